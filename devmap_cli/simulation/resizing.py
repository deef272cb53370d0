"""The sizes that image processors bring pictures to, by the rules of transformers' own; sizes are (height, width).

The processors themselves are not asked: most of them need torchvision, and all of them the picture.
"""

from __future__ import annotations

import math

Size = tuple[int, int]


def fit_pixels(height: int, width: int, factor: int, least: int, most: int) -> Size:
    """Sides rounded to `factor`, scaled so that the pixels lie between `least` and `most`.

    Source: `smart_resize` of transformers' image_processing_qwen2_vl.py.
    """
    return fit_video(1, height, width, factor, 1, least, most)


def fit_video(num_frames: int, height: int, width: int, factor: int, temporal: int, least: int, most: int) -> Size:
    """As `fit_pixels`, for the pixels of all frames together, whose number is rounded to `temporal` first.

    Source: `smart_resize` of transformers' video_processing_qwen3_vl.py, for sides of at least `factor`.
    """
    rounded = round(height / factor) * factor, round(width / factor) * factor
    volume = round(num_frames / temporal) * temporal * rounded[0] * rounded[1]
    if volume > most:
        scale = (num_frames * height * width / most) ** 0.5
        return max(factor, int(height / scale / factor) * factor), max(factor, int(width / scale / factor) * factor)
    if volume < least:
        scale = (least / (num_frames * height * width)) ** 0.5
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rounded


def pad_patches(height: int, width: int, patch: int, merge: int, most: int, most_on_a_side: int) -> Size:
    """Sides never enlarged, shrunk to `most` patches and `most_on_a_side`, then filled up to whole merged squares.

    Source: `navit_resize` of transformers' image_processing_kimi_k25.py.
    """
    num_patches = max(1, height // patch) * max(1, width // patch)
    longest = most_on_a_side * patch
    scale = min(1.0, (most / num_patches) ** 0.5, longest / height, longest / width)
    factor = merge * patch
    sides = (min(max(1, int(side * scale)), longest) for side in (height, width))
    rows, columns = (math.ceil(side / factor) for side in sides)
    return rows * factor, columns * factor


def closest_grid(height: int, width: int, square: int, most: int) -> Size:
    """The rows and columns of squares of nearly the picture's size and shape, `most` squares at most.

    Of grids alike in shape the largest, where the processor takes any.
    Source: `smart_resize` of transformers' image_processing_muse_glimmer.py.
    """
    rows, columns = height / square, width / square
    if rows * columns > most:
        rows, columns = (most * height / width) ** 0.5, (most * width / height) ** 0.5
    grids = {
        (row, column)
        for row in (math.floor(rows), math.ceil(rows))
        for column in (math.floor(columns), math.ceil(columns))
        if row >= 1 and column >= 1 and row * column <= most
    }
    if not grids:
        return max(1, round(rows)), max(1, round(columns))
    return min(grids, key=lambda grid: (abs(grid[0] / grid[1] - height / width), -grid[0]))


def tiled_canvas(height: int, width: int, tile: int, most: int) -> Size:
    """The rows and columns of tiles, `most` at most, that the picture is enlarged least on, or else shrunk least.

    Of those alike the smallest. Source: `get_best_fit` of transformers' image_processing_llama4.py and
    `get_optimal_tiled_canvas` of its image_processing_mllama.py.
    """
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    scales = {(rows, columns): min(rows * tile / height, columns * tile / width) for rows, columns in grids}
    enlarging = [scale for scale in scales.values() if scale >= 1]
    best = min(enlarging) if enlarging else max(scales.values())
    return min((grid for grid in grids if scales[grid] == best), key=lambda grid: grid[0] * grid[1])


def cropped_grid(height: int, width: int, tile: int, most: int) -> Size:
    """The rows and columns of tiles, `most` at most, of nearly the picture's shape.

    Of those alike the largest whose area is less than twice the picture's. Source: `get_optimal_tiled_canvas` of
    transformers' image_processing_got_ocr2.py.
    """
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=math.prod):
        difference = abs(width / height - columns / rows)
        is_alike = difference == least and width * height > 0.5 * tile**2 * columns * rows
        if difference < least or is_alike:
            best, least = (rows, columns), difference
    return best


def sliding_windows(height: int, width: int, whole: int, window: int, longest: int) -> Size:
    """The rows and columns of windows cut out of a picture beside its view as a whole; (0, 0) for none.

    Source: `_plan_patches` of transformers' image_processing_step3p7.py.
    """
    if min(height, width) < 32 and max(height, width) > 4 * min(height, width):
        height = width = max(height, width)
    if max(height, width) > longest:
        scale = longest / max(height, width)
        height, width = int(height * scale), int(width * scale)
    short, long = sorted((height, width))
    if long <= whole and long <= 1.5 * short:
        return 0, 0
    is_bounded = long > whole and long <= 4 * short
    side = window if is_bounded else short if long <= whole else min(short, window)
    rows, columns = (
        max(1, size // side + (size % side > 0.2 * side)) if size >= side else 1 for size in (height, width)
    )
    return rows, columns

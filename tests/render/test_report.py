"""The report of a plan: bars that are true to the bytes, all modules, well-formed and the same every time."""

from __future__ import annotations

import errno
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer, MapWorkload
from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec
from devmap_cli.render.report import Report, check_report_path, write_report

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30
GPUS = [Device("cuda", index) for index in range(64)]
HOSTILE = "<script>&\"'</title>"


def weight(num_bytes: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("weight", (num_bytes,), "int8", num_bytes),)


def model(num_layers: int = 4, name: str = "model", model_id: str = "org/toy") -> ModelSpec:
    """Embedding 2 GiB, layers of 1 GiB, norm 4 KiB; the head shares the embedding's weights."""
    layers = tuple(ModuleSpec(str(index), "Layer", weight(GIB)) for index in range(num_layers))
    body = ModuleSpec(
        name,
        "Model",
        children=(
            ModuleSpec("embed_tokens", "Embedding", weight(2 * GIB)),
            ModuleSpec("layers", "ModuleList", children=layers),
            ModuleSpec("norm", "Norm", weight(4096)),
        ),
    )
    root = ModuleSpec("", "Toy", children=(body, ModuleSpec("lm_head", "Linear", weight(2 * GIB))))
    ties = ((f"{name}.embed_tokens.weight", "lm_head.weight"),)
    return ModelSpec(model_id, "abc", "Toy", "toy", "bfloat16", root, ties)


def plan(num_gpus: int = 2, num_layers: int = 4, name: str = "model", **changes: Any) -> MapFile:
    """Layers in equal parts over GPUs with budgets of 12 GiB; RAM and disk hold nothing."""
    gpus = GPUS[:num_gpus]
    device_map = {f"{name}.embed_tokens": gpus[0]}
    device_map |= {f"{name}.layers.{index}": gpus[index * num_gpus // num_layers] for index in range(num_layers)}
    device_map |= {f"{name}.norm": gpus[-1], "lm_head": gpus[0]}
    sizes = dict.fromkeys(gpus, 0)
    for key, device in device_map.items():
        sizes[device] += 2 * GIB if "embed" in key else GIB if "layers" in key else 4096 if "norm" in key else 0
    devices = tuple(MapDevice(gpu, 12 * GIB, sizes[gpu], GIB // 2, GIB, GIB // 4) for gpu in gpus)
    fields: dict[str, Any] = {
        "model": MapModel("org/toy", "abc", "Toy", "bfloat16", {"scheme": "nf4"}),
        "strategy": "balanced",
        "workload": MapWorkload(1, 2048, 256, ((1024, 768),)),
        "devices": (*devices, MapDevice(CPU, 16 * GIB, 0), MapDevice(DISK, 500 * GIB, 0)),
        "transfers": tuple(MapTransfer(*pair, 8192) for pair in pairwise(gpus)),
        "versions": {"devmap": "1.2.3"},
    }
    return MapFile(device_map, **{**fields, **changes})


def report(**changes: Any) -> Report:
    """The report of `plan`, with a card and a predicted speed."""
    return Report.of(plan(**changes), model(), cards={GPUS[0]: "RTX 4090"}, speed=["24.5 tokens/s"])


def written(folder: Path, content: Report, extension: str = "svg") -> str:
    path = folder / f"report.{extension}"
    write_report(path, content)
    return path.read_text(encoding="utf-8")


def drawn(folder: Path, content: Report) -> ET.Element:
    return ET.fromstring(written(folder, content))


def bars(picture: ET.Element) -> dict[str, list[ET.Element]]:
    """The parts of each device's bar that stand for bytes, from left to right."""
    return {
        group.attrib["data-device"]: [rect for rect in group.iter(f"{SVG}rect") if "data-bytes" in rect.attrib]
        for group in picture.iter(f"{SVG}g")
    }


def number(element: ET.Element, name: str) -> float:
    return float(element.attrib[name])


def texts(picture: ET.Element, tag: str = "text") -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}{tag}")]


class TestBars:
    def test_widths_are_proportional_and_add_up_to_the_budget(self, tmp_path: Path) -> None:
        picture = drawn(tmp_path, report())
        scales = set()
        for device in ("cuda:0", "cuda:1"):
            parts = bars(picture)[device]
            group = next(group for group in picture.iter(f"{SVG}g") if group.attrib["data-device"] == device)
            (budget,) = (rect for rect in group.iter(f"{SVG}rect") if rect.attrib["class"] == "budget")
            assert sum(int(rect.attrib["data-bytes"]) for rect in parts) == 12 * GIB
            assert sum(number(rect, "width") for rect in parts) == pytest.approx(number(budget, "width"), abs=0.02)
            scale = number(budget, "width") / (12 * GIB)
            x = number(budget, "x")
            for rect in parts:
                assert number(rect, "width") == pytest.approx(int(rect.attrib["data-bytes"]) * scale, abs=0.002)
                assert number(rect, "x") == pytest.approx(x, abs=0.01)
                x += number(rect, "width")
            scales.add(round(scale * GIB, 6))
        assert len(scales) == 1

    def test_parts_are_told_apart(self, tmp_path: Path) -> None:
        parts = bars(drawn(tmp_path, report()))["cuda:0"]
        found: dict[str, int] = {}
        for rect in parts:
            found[rect.attrib["class"]] = found.get(rect.attrib["class"], 0) + int(rect.attrib["data-bytes"])
        assert found == {
            "weights module": 2 * GIB,
            "weights layers": 2 * GIB,
            "kv_cache": GIB // 2,
            "activation": GIB,
            "overhead": GIB // 4,
            "free": 12 * GIB - 4 * GIB - GIB // 2 - GIB - GIB // 4,
        }

    def test_every_module_has_its_name_and_bytes(self, tmp_path: Path) -> None:
        titles = texts(drawn(tmp_path, report()), "title")
        assert "model.embed_tokens: 2.00 GiB (2,147,483,648 bytes)" in titles
        assert "lm_head: 0 B, shares weights with model.embed_tokens" in titles
        for key in plan().device_map:
            assert sum(title.startswith(f"{key}:") for title in titles) == 1

    def test_what_is_wide_enough_is_named(self, tmp_path: Path) -> None:
        found = texts(drawn(tmp_path, report()))
        assert {"layers.0-1", "layers.2-3", "embed_toke…", "activations"} <= set(found)
        assert "norm" not in found
        assert "embed_tokens" in texts(drawn(tmp_path, report(num_gpus=1, devices=plan(1).devices[:1])))

    def test_a_large_tier_has_a_scale_of_its_own(self, tmp_path: Path) -> None:
        # 16 GiB of RAM stay on the scale of 12 GiB GPUs, 500 GiB of disk don't
        picture = drawn(tmp_path, report())
        found = {name: (number(parts[-1], "x"), number(parts[-1], "width")) for name, parts in bars(picture).items()}
        left = found["cpu"][0]
        end = sum(found["cuda:0"]) - left
        assert end / found["cpu"][1] == pytest.approx(12 / 16, abs=1e-4)
        assert found["disk"][1] == found["cpu"][1]
        assert texts(picture).count("own scale") == 1
        assert "0 B of 500.0 GiB" in texts(picture)

    def test_a_peak_over_the_budget_is_marked_and_stays_in_the_picture(self, tmp_path: Path) -> None:
        over = MapDevice(GPUS[0], 3 * GIB, 4 * GIB, GIB)
        picture = drawn(tmp_path, report(devices=(over, *plan().devices[1:])))
        assert any("over" in rect.attrib.get("class", "").split() for rect in picture.iter(f"{SVG}rect"))
        assert "167 %, 2.00 GiB too much" in texts(picture)
        assert sum(int(rect.attrib["data-bytes"]) for rect in bars(picture)["cuda:0"]) == 5 * GIB

    def test_a_bare_map_has_bars_without_budgets(self, tmp_path: Path) -> None:
        picture = drawn(tmp_path, Report.of(MapFile({"": GPUS[0]}), model()))
        (part,) = bars(picture)["cuda:0"]
        assert int(part.attrib["data-bytes"]) == 6 * GIB + 4096
        assert {"no budget", "the whole model", "6.00 GiB"} <= set(texts(picture))

    def test_modules_end_where_the_stated_weights_end(self, tmp_path: Path) -> None:
        # the device holds 4 GiB; a map by hand may state less, or more
        for stated in (3 * GIB, 5 * GIB):
            device = MapDevice(GPUS[0], 12 * GIB, stated)
            parts = bars(drawn(tmp_path, report(devices=(device, *plan().devices[1:]))))["cuda:0"]
            weights = [rect for rect in parts if rect.attrib["class"].startswith("weights")]
            assert sum(int(rect.attrib["data-bytes"]) for rect in weights) == stated
            assert sum(int(rect.attrib["data-bytes"]) for rect in parts) == 12 * GIB

    def test_a_tensor_counts_at_the_nearest_key(self) -> None:
        # a map by hand may name a module and one inside it: body 2 + 3 GiB and the norm, layer 1 GiB
        (device,) = Report.of(MapFile({"model": GPUS[0], "model.layers.1": GPUS[0]}), model()).devices
        assert [module.num_bytes for module in device.modules] == [5 * GIB + 4096, GIB]

    def test_no_devices_are_a_picture_too(self, tmp_path: Path) -> None:
        assert texts(drawn(tmp_path, Report(())))[0] == "device map"


@pytest.mark.parametrize("num_gpus", [1, 16, 64])
def test_all_stays_inside_the_picture(tmp_path: Path, num_gpus: int) -> None:
    picture = drawn(tmp_path, Report.of(plan(num_gpus, 2 * num_gpus), model(2 * num_gpus)))
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    assert len(bars(picture)) == num_gpus + 2
    for rect in picture.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert 0 <= number(rect, "x") <= number(rect, "x") + number(rect, "width") <= width
            assert number(rect, "y") + number(rect, "height") <= height
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= number(text, "y") <= height
    tops = [number(parts[0], "y") for parts in bars(picture).values()]
    assert tops == sorted(set(tops))


def test_very_long_names_are_cut_in_the_middle(tmp_path: Path) -> None:
    name = "model_" + "x" * 300
    picture = drawn(tmp_path, Report.of(plan(name=name), model(name=name)))
    assert max(map(len, texts(picture))) < 150
    assert any("…" in text and ".embed_tokens" in text for text in texts(picture))
    assert any(title.startswith(f"{name}.layers.0:") for title in texts(picture, "title"))


def hostile() -> Report:
    found = plan(name=HOSTILE, model=MapModel(f"org/{HOSTILE}\x1b\udc80", None, HOSTILE, "bfloat16"), strategy=HOSTILE)
    cards = {GPUS[0]: HOSTILE}
    return Report.of(found, model(name=HOSTILE), cards=cards, speed=[HOSTILE], notes=[HOSTILE])


def test_names_are_escaped_in_a_picture(tmp_path: Path) -> None:
    picture = drawn(tmp_path, hostile())
    assert any(title.startswith(f"{HOSTILE}.layers.0:") for title in texts(picture, "title"))
    assert f"org/{HOSTILE}\ufffd\ufffd" in texts(picture)
    assert not list(picture.iter(f"{SVG}script"))


class Page(HTMLParser):
    """The tags of a page and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.cells.append(data.strip())


class TestPage:
    def test_it_has_the_picture_the_figures_and_every_module(self, tmp_path: Path) -> None:
        html = written(tmp_path, report(), "html")
        cells = Page(html).cells
        assert html.startswith("<!DOCTYPE html>\n<html")
        assert ET.fromstring(re.search("<svg.*</svg>", html, re.DOTALL)[0]).attrib["role"] == "img"  # type: ignore[index]
        for key in plan().device_map:
            assert any(cell == key or cell.startswith(f"{key} (shares") for cell in cells)
        row = cells.index("RTX 4090", cells.index("Memory of each device"))
        assert cells[row + 1 : row + 9] == [
            *("12.0 GiB", "4.00 GiB", "512.0 MiB", "1.00 GiB", "256.0 MiB", "5.75 GiB", "6.25 GiB", "48 %")
        ]
        assert "2,147,483,648" in cells

    def test_it_asks_for_nothing_from_elsewhere(self, tmp_path: Path) -> None:
        for extension in ("html", "svg"):
            found = written(tmp_path, report(), extension)
            assert not re.search(r"<script|<link|<img|@import|@font-face|href=|src=", found)
            assert set(re.findall(r"https?://[^\"' ]+", found)) == {"http://www.w3.org/2000/svg"}
            assert "prefers-color-scheme: dark" in found

    def test_names_are_escaped(self, tmp_path: Path) -> None:
        page = Page(written(tmp_path, hostile(), "html"))
        assert "script" not in page.tags
        assert f"{HOSTILE}.layers.0" in page.cells
        assert page.tags.count("title") > 1

    def test_no_devices_are_a_page_too(self, tmp_path: Path) -> None:
        assert "Memory of each device" in Page(written(tmp_path, Report(()), "html")).cells


def test_facts_are_told_in_both(tmp_path: Path) -> None:
    said = [
        *("org/toy, revision abc", "Toy", "bfloat16", "bitsandbytes nf4", "balanced", "24.5 tokens/s", "devmap 1.2.3"),
        "1 × (2,048 prompt + 256 new tokens), image 768×1024, attention sdpa",
        "GPU 0 → GPU 1: 8.0 KiB per token",
    ]
    assert set(said) <= set(texts(drawn(tmp_path, report())))
    assert set(said) <= set(Page(written(tmp_path, report(), "html")).cells)


@pytest.mark.parametrize(
    ("model_id", "title"), [("org/toy", "toy"), ("/models/toy/", "toy"), (".", "Toy"), ("..", "Toy")]
)
def test_the_heading_is_the_models_name(model_id: str, title: str) -> None:
    assert report(model=MapModel(model_id, None, "Toy", "bfloat16")).title == title


def test_equal_transfers_in_a_row_are_one_line() -> None:
    facts = list(Report.of(plan(64, 64), model(64)).facts())
    assert ("between devices", "GPU 0 → GPU 1 → … → GPU 63: 8.0 KiB per token, each of 63 hops") in facts


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (None, "none"),
        ({"scheme": "int8"}, "bitsandbytes int8"),
        (
            {"quant_method": "gptq", "bits": 4, "desc_act": False, "modules": {"a": 1}},
            "gptq, bits 4, desc_act false",
        ),
    ],
)
def test_quantization_in_words(quantization: dict[str, Any] | None, text: str) -> None:
    found = plan(model=MapModel("toy", None, "Toy", "bfloat16", quantization))
    assert dict(Report.of(found, model()).facts())["quantization"] == text


def test_a_picture_is_told_to_who_cannot_see_it(tmp_path: Path) -> None:
    picture = drawn(tmp_path, report())
    names = picture.attrib["aria-labelledby"].split()
    title, description = (next(e for e in picture.iter() if e.attrib.get("id") == name) for name in names)
    assert title.text == "Memory plan of toy"
    assert "GPU 0 (RTX 4090): peak 5.75 of 12.0 GiB (weights 4.00 GiB, KV cache" in (description.text or "")
    assert "holds model.embed_tokens, model.layers.0-1, lm_head." in (description.text or "")


@pytest.mark.parametrize("extension", ["svg", "html", "SVG", "Html"])
def test_the_same_report_gives_the_same_bytes(tmp_path: Path, extension: str) -> None:
    assert written(tmp_path, report(), extension) == written(tmp_path, report(), extension)


class TestFile:
    @pytest.mark.parametrize("name", ["report.pdf", "report", "-", "", ".svg", "report.svg.txt"])
    def test_another_extension_is_refused_with_both_named(self, tmp_path: Path, name: str) -> None:
        for attempt in (check_report_path, lambda path: write_report(path, report())):
            with pytest.raises(RequestError) as caught:
                attempt(name and (name if name == "-" else str(tmp_path / name)))
            assert ".svg" in caught.value.hint
            assert ".html" in caught.value.hint
        assert not list(tmp_path.iterdir())

    def test_a_folder_is_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "report.svg").mkdir()
        with pytest.raises(RequestError, match="is a folder") as caught:
            write_report(tmp_path / "report.svg", report())
        assert "report.svg/report.svg" in caught.value.hint

    def test_a_missing_folder_is_told_as_for_maps(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="does not exist") as caught:
            write_report(tmp_path / "none" / "report.html", report())
        assert caught.value.hint.startswith("mkdir -p")

    def test_a_folder_that_may_not_be_written_is_told_as_for_maps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(SurroundingsError, match="is read-only"):
            write_report(tmp_path / "report.svg", report())
        assert not list(tmp_path.iterdir())

    def test_a_name_that_no_file_has_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(SurroundingsError, match="too long"):
            write_report(tmp_path / f"{'x' * 5000}.svg", report())

    def test_nothing_but_the_report_is_left_behind(self, tmp_path: Path) -> None:
        written(tmp_path, report())
        assert [path.name for path in tmp_path.iterdir()] == ["report.svg"]

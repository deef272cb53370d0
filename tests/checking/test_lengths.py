from __future__ import annotations

from pathlib import Path

import pytest

from devmap_cli.errors import RequestError
from devmap_cli.mapfile import MapWorkload
from devmap_cli.simulation.positions import usual_prompt_tokens
from tests.checking.rehearsing import Subject, codes, the
from tests.support.toys import TOYS


def subject(folder: Path, name: str) -> Subject:
    return Subject(folder, TOYS[name].config)


@pytest.mark.parametrize(("prompt_tokens", "is_too_long"), [(24, False), (25, True)])
def test_positions_that_are_rows_of_a_table(tmp_path: Path, prompt_tokens: int, is_too_long: bool) -> None:
    report = subject(tmp_path, "opt").check({"": 0}, workload=MapWorkload(1, prompt_tokens, 8))  # it has 32
    assert codes(report) == (["too-long"] if is_too_long else [])
    if is_too_long:
        finding = the("too-long", report)
        assert (finding.severity, finding.module) == ("error", "model.decoder.embed_positions")
        assert finding.message == "33 tokens are more than the 32 positions that the model was made for"
        assert report.forecast.skipped is not None


def test_positions_that_are_computed(tmp_path: Path) -> None:
    report = subject(tmp_path, "qwen2").check({"": 0}, workload=MapWorkload(1, 250, 8))  # it was made for 256
    assert the("too-long", report).severity == "warning"
    assert report.passed
    assert report.forecast.skipped is None


def test_a_model_that_reads_only_needs_no_room_for_an_answer(tmp_path: Path) -> None:
    bert = subject(tmp_path, "bert")
    limit = TOYS["bert"].config["max_position_embeddings"]
    assert bert.check({"": 0}, workload=MapWorkload(1, limit, 999)).findings == ()
    assert codes(bert.check({"": 0}, workload=MapWorkload(1, limit + 1, 1))) == ["too-long"]


def test_a_prompt_of_sound(tmp_path: Path) -> None:
    whisper = subject(tmp_path, "whisper")
    report = whisper.check({"": 0}, workload=MapWorkload(1, 9999, 8))
    assert report.findings == ()
    assert "sound" in report.forecast.assumptions[0]
    with pytest.raises(RequestError, match="takes sound"):
        whisper.check({"": 0}, workload=MapWorkload(1, 32, 8, ((64, 64),)))


def test_the_usual_prompt_leaves_room_for_the_answer(tmp_path: Path) -> None:
    model = subject(tmp_path, "qwen2").rehearser(None).model
    assert usual_prompt_tokens(model, 2048, 56) == 200
    assert usual_prompt_tokens(model, 100, 56) == 100
    assert usual_prompt_tokens(model, 2048, 999) == 1


@pytest.mark.parametrize(
    "workload",
    [MapWorkload(1 << 20, 32, 8), MapWorkload(1, 10**20, 8), MapWorkload(1, 32, 1 << 25)],
)
def test_more_tokens_than_can_be_rehearsed(tmp_path: Path, workload: MapWorkload) -> None:
    with pytest.raises(RequestError, match="more than a rehearsal takes"):
        subject(tmp_path, "qwen2").check({"": 0}, workload=workload)


@pytest.mark.parametrize(
    "workload",
    [MapWorkload(1, 4096, 8, ((100_000, 100_000),)), MapWorkload(1, 4096, 8, videos=((9, 9, 100_000),))],
)
def test_more_pixels_than_can_be_rehearsed(tmp_path: Path, workload: MapWorkload) -> None:
    with pytest.raises(RequestError, match="pixels in all are more than a rehearsal takes"):
        subject(tmp_path, "qwen2_5_vl").check({"": 0}, workload=workload)


def test_images_that_need_a_longer_prompt(tmp_path: Path) -> None:
    vision = subject(tmp_path, "qwen2_5_vl")
    with pytest.raises(RequestError, match=r"the images take \d+ tokens, the prompt has 4") as refused:
        vision.check({"": 0}, workload=MapWorkload(1, 4, 8, ((112, 112),)))
    needed = int(refused.value.hint.removeprefix("make room for them: --prompt-tokens "))
    vision.check({"": 0}, workload=MapWorkload(1, needed, 8, ((112, 112),)))

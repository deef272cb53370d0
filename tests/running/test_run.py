from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import FindingsError, OutOfMemoryError, RequestError, SurroundingsError
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapWorkload
from devmap_cli.running.report import RunReport
from devmap_cli.running.request import Listener, Progress, RunRequest
from devmap_cli.running.run import run_map
from tests.running.conftest import CHAT_TEMPLATE, LETTERS, SPECIAL, spec_of, spread

REQUEST = RunRequest("hello", max_new_tokens=6)
GPU_0 = Device.parse("0")


def run(folder: Path, *devices: str, request: RunRequest = REQUEST) -> RunReport:
    spec = spec_of(folder)
    return run_map(spread(spec, *devices), spec, request)


def plain_text(folder: Path, prompt: str, num_tokens: int) -> str:
    """What transformers alone generates, without a map."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    auto = AutoModelForSeq2SeqLM if AutoConfig.from_pretrained(folder).is_encoder_decoder else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = auto.from_pretrained(folder).generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    skipped = 1 if auto is AutoModelForSeq2SeqLM else inputs["input_ids"].shape[1]
    return str(tokenizer.decode(output[0, skipped:], skip_special_tokens=True))


class TestGenerating:
    @pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
    @pytest.mark.parametrize("devices", [["cpu"], ["cpu", "disk"], ["disk"]])
    def test_the_text_is_that_of_transformers_alone(
        self, models: dict[str, Path], name: str, devices: list[str]
    ) -> None:
        report = run(models[name], *devices)
        assert report.generation.texts == (plain_text(models[name], "hello", 6),)

    @pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
    def test_over_simulated_gpus_cpu_and_disk(self, models: dict[str, Path], name: str) -> None:
        spec = spec_of(models[name])
        report = run_map(spread(spec, "0", "1", "cpu", "disk"), spec, REQUEST, simulate=True)
        assert report.generation.texts == (plain_text(models[name], "hello", 6),)
        assert [item.device.label for item in report.devices] == ["GPU 0", "GPU 1", "cpu", "disk"]
        for item in report.devices[:2]:
            assert item.memory.peak_allocated_bytes >= item.weights_bytes > 0
            assert item.memory.peak_reserved_bytes is not None
            assert item.memory.peak_reserved_bytes >= item.memory.peak_allocated_bytes
            assert "simulated" in item.basis

    def test_text_streams_as_it_comes(self, models: dict[str, Path]) -> None:
        spec, texts = spec_of(models["llama"]), list[str]()
        report = run_map(spread(spec, "cpu"), spec, REQUEST, Listener(on_text=texts.append))
        assert len(texts) > 1
        assert "".join(texts) == report.generation.texts[0]

    def test_a_batch_repeats_the_prompt_and_streams_the_first(self, models: dict[str, Path]) -> None:
        spec, texts = spec_of(models["llama"]), list[str]()
        request = replace(REQUEST, batch_size=3)
        report = run_map(spread(spec, "cpu"), spec, request, Listener(on_text=texts.append))
        assert report.generation.texts == ("".join(texts),) * 3
        assert report.batch_size == 3

    def test_drawn_tokens_repeat_by_seed(self, models: dict[str, Path]) -> None:
        drawn = replace(REQUEST, temperature=5.0)
        texts = [run(models["llama"], "cpu", request=replace(drawn, seed=seed)).generation.texts for seed in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]

    def test_times_and_counts(self, models: dict[str, Path]) -> None:
        report = run(models["llama"], "cpu")
        generation = report.generation
        assert (generation.num_prompt_tokens, generation.num_new_tokens) == (5, 6)
        assert generation.stop_reason == "max new tokens"
        assert 0 < generation.seconds_to_first_token < generation.seconds
        assert generation.decode_tokens_per_second == pytest.approx(
            5 / (generation.seconds - generation.seconds_to_first_token)
        )
        assert report.load_seconds > 0

    def test_one_token_has_no_decode_speed(self, models: dict[str, Path]) -> None:
        report = run(models["llama"], "cpu", request=replace(REQUEST, max_new_tokens=1))
        assert report.generation.num_new_tokens == 1
        assert report.generation.decode_tokens_per_second is None

    def test_an_end_token_ends_it(self, broken: Path) -> None:
        text = run(broken, "cpu").generation.texts[0]
        end = (SPECIAL + tuple(LETTERS)).index(text[2])
        settings = json.loads((broken / "generation_config.json").read_text())
        (broken / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, end]}))
        report = run(broken, "cpu").generation
        assert report.stop_reason == "end of sequence"
        assert report.num_new_tokens == text.index(text[2]) + 1

    def test_the_chat_template_unless_raw(self, broken: Path) -> None:
        (broken / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        in_template = run(broken, "cpu").generation
        assert in_template.used_chat_template
        assert in_template.num_prompt_tokens == 7  # <user>, five letters, <bot>
        raw = run(broken, "cpu", request=replace(REQUEST, raw=True)).generation
        assert not raw.used_chat_template
        assert raw.num_prompt_tokens == 5

    def test_a_model_without_a_chat_template_gets_the_prompt_as_it_is(self, models: dict[str, Path]) -> None:
        assert not run(models["llama"], "cpu").generation.used_chat_template

    def test_a_broken_chat_template(self, broken: Path) -> None:
        (broken / "chat_template.jinja").write_text("{{ raise_exception('no system prompt') }}")
        with pytest.raises(RequestError, match="no system prompt") as caught:
            run(broken, "cpu")
        assert "--raw" in (caught.value.hint or "")

    def test_longer_than_the_model_was_made_for_is_a_warning(self, models: dict[str, Path]) -> None:
        spec, warnings = spec_of(models["llama"]), list[str]()
        request = RunRequest("x" * 127, max_new_tokens=2)  # 129 of 128 positions
        report = run_map(spread(spec, "cpu"), spec, request, Listener(on_warning=warnings.append))
        assert report.warnings == tuple(warnings)
        assert "128 positions" in warnings[0]

    def test_longer_than_learned_positions(self, models: dict[str, Path]) -> None:
        with pytest.raises(RequestError, match="no position for a sequence that long"):
            run(models["gpt2"], "cpu", request=RunRequest("x" * 70, max_new_tokens=2))

    def test_the_maps_workload_is_the_default(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["llama"])
        document = replace(spread(spec, "cpu"), workload=MapWorkload(max_new_tokens=3))
        assert run_map(document, spec, RunRequest("hello")).generation.num_new_tokens == 3

    def test_the_attention_asked_for_is_used(self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("sdpa was called")

        eager = replace(REQUEST, attention="eager")
        expected = run(models["llama"], "cpu").generation.texts
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
        assert run(models["llama"], "cpu", request=eager).generation.texts == expected


class TestReport:
    def test_weights_are_counted_where_they_are(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["gpt2"])
        report = run_map(spread(spec, "cpu", "disk"), spec, REQUEST)
        shared = spec.tied_to_another()
        total = sum(tensor.num_bytes for name, tensor in spec.tensors() if name not in shared)
        by_device = {item.device: item.weights_bytes for item in report.devices}
        assert set(by_device) == {CPU, DISK}
        assert sum(by_device.values()) == total
        assert by_device[DISK] > 0

    def test_the_document_keeps_planned_and_measured_apart(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["llama"])
        bare = spread(spec, "cpu")
        document = MapFile(
            bare.device_map,
            MapModel(spec.model_id, None, spec.class_name, spec.dtype),
            "balanced",
            MapWorkload(),
            (MapDevice(CPU, 10**9, 200_000, 3_000, 2_000, 1_000),),
        )
        found = json.loads(json.dumps(run_map(document, spec, REQUEST).to_document()))
        (device,) = found["devices"]
        assert device["planned"]["peak_bytes"] == 206_000
        assert device["planned"]["budget_bytes"] == 10**9
        assert device["measured"]["weights_bytes"] == sum(tensor.num_bytes for _, tensor in spec.tensors())
        assert device["measured"]["peak_allocated_bytes"] > 10**7
        assert found["text"] == found["measured"]["texts"][0]
        assert found["format"] == "devmap.run/1"

    def test_progress_of_loading_is_told(self, models: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
        spec, steps = spec_of(models["llama"]), list[Progress]()
        run_map(spread(spec, "cpu", "disk"), spec, REQUEST, Listener(on_progress=steps.append))
        loading = [step for step in steps if step.step == "Loading weights"]
        assert [step.done for step in loading] == list(range(1, loading[0].total + 1))
        assert capfd.readouterr() == ("", "")


class TestRefusals:
    def test_devices_that_are_not_here(self, models: dict[str, Path]) -> None:
        with pytest.raises(SurroundingsError, match="the map needs xpu:7") as caught:
            run(models["llama"], "xpu:7", "cpu")
        assert "devmap plan" in (caught.value.hint or "")

    def test_a_map_of_another_class(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["llama"])
        document = replace(spread(spec, "cpu"), model=MapModel("x", None, "OtherForCausalLM", "float32"))
        with pytest.raises(RequestError, match="the map is for OtherForCausalLM"):
            run_map(document, spec, REQUEST)

    def test_a_bare_map_of_another_model(self, models: dict[str, Path]) -> None:
        document = spread(spec_of(models["gpt2"]), "cpu")
        document = MapFile({key: value for key, value in document.device_map.items() if key != "lm_head"})
        with pytest.raises(RequestError, match="of another model"):
            run_map(document, spec_of(models["llama"]), REQUEST)

    def test_a_map_with_errors(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["llama"])
        device_map = dict(spread(spec, "cpu").device_map)
        del device_map["model.rotary_emb"]
        with pytest.raises(FindingsError, match=r"model\.rotary_emb has no device"):
            run_map(MapFile(device_map), spec, REQUEST)

    def test_a_map_with_a_stray_key_runs_with_a_warning(self, models: dict[str, Path]) -> None:
        spec = spec_of(models["llama"])
        report = run_map(MapFile({**spread(spec, "cpu").device_map, "model.nothing": CPU}), spec, REQUEST)
        assert "model.nothing names no part" in report.warnings[0]

    def test_an_encoder_does_not_generate(self, models: dict[str, Path]) -> None:
        with pytest.raises(RequestError, match="does not generate"):
            run_map(MapFile({"": CPU}), spec_of(models["bert"]), REQUEST)

    @pytest.mark.parametrize("phase", ["loading", "generating"])
    def test_out_of_memory_names_device_and_phase(self, models: dict[str, Path], phase: str) -> None:
        spec = spec_of(models["llama"])
        capacity_bytes = 2 << 20 if phase == "loading" else 3 << 20  # the allocator's smallest segment is 2 MiB
        document = MapFile(
            {"": GPU_0},
            MapModel(spec.model_id, None, spec.class_name, spec.dtype),
            devices=(MapDevice(GPU_0, capacity_bytes - (1 << 20), 0),),
        )
        request = REQUEST if phase == "loading" else replace(REQUEST, batch_size=3000)
        told = "GPU 0 ran out of memory while " + ("loading" if phase == "loading" else "(reading|generating)")
        with pytest.raises(OutOfMemoryError, match=told) as caught:
            run_map(document, spec, request, simulate=True)
        assert "--reserve 0=" in (caught.value.hint or "")

    @pytest.mark.parametrize("prompt", ["", "  \n"])
    def test_an_empty_prompt(self, prompt: str) -> None:
        with pytest.raises(RequestError, match="empty"):
            RunRequest(prompt)

    @pytest.mark.parametrize("change", [{"temperature": float("nan")}, {"temperature": -1}, {"batch_size": 0}])
    def test_values_that_no_run_has(self, change: dict[str, float]) -> None:
        with pytest.raises(RequestError):
            RunRequest("hello", **change)  # type: ignore[arg-type]

from __future__ import annotations

from pathlib import Path

import pytest

from devmap_cli.checking.check import CheckReport
from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError
from devmap_cli.mapfile import MapWorkload
from devmap_cli.units import format_bytes
from tests.checking.rehearsing import SHORT, Subject, codes, the
from tests.support.toys import TOYS

MIB = 1 << 20
LAYERS = {f"model.layers.{index}": 0 if index < 2 else 1 for index in range(4)}
WHOLE: dict[str, int | str] = {
    "model.embed_tokens": 0,
    **LAYERS,
    "model.norm": 1,
    "model.rotary_emb": 0,
    "lm_head": 1,
}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("qwen2"), TOYS["qwen2"].config)


def without(*keys: str) -> dict[str, int | str]:
    return {key: device for key, device in WHOLE.items() if key not in keys}


def peaks(report: CheckReport) -> dict[str, int]:
    return {item.device.label: item.highest.peak_bytes for item in report.forecast.devices}


def test_a_right_map_is_rehearsed_to_its_end(qwen2: Subject) -> None:
    report = qwen2.check(WHOLE)
    assert report.findings == ()
    assert report.passed
    assert report.forecast.stopped_in is None
    assert [item.device.label for item in report.forecast.devices] == ["GPU 0", "GPU 1"]
    for item in report.forecast.devices:
        assert [phase.phase for phase in item.phases] == ["load", "prefill", "decode"]
        assert item.budget_bytes is item.free_bytes is None


def test_weights_and_cache_are_what_a_pencil_gives(qwen2: Subject) -> None:
    # GPU 0: embedding 8,192·2, two layers of 30,976·2; inv_freq twice 8·4. The allocator rounds each tensor up to 512.
    # Cache: 128 bytes per token and layer, the last of 32 + 8 tokens not in it.
    decode = qwen2.check(WHOLE).forecast.devices[0].phases[-1]
    exact = 2 * 8192 + 2 * 2 * 30_976 + 64
    assert exact <= decode.weights_bytes < exact + 40 * 512
    assert 2 * 128 * 38 <= decode.kv_cache_bytes <= 2 * 128 * 40 + 4 * 512


def test_a_forgotten_rotary_embedding_is_copied_from_the_cpu(qwen2: Subject) -> None:
    report = qwen2.check(without("model.rotary_emb"))
    finding = the("uncovered-buffer", report)
    assert codes(report) == ["uncovered-buffer"]
    assert not report.passed
    assert finding.consequence == "transformers leaves it on the cpu, and every token copies it to GPU 0"
    assert finding.fix == 'add "model.rotary_emb": 0'
    assert report.forecast.stopped_in is None


def test_a_forgotten_parameter_is_refused_so_only_weights_are_known(qwen2: Subject) -> None:
    report = qwen2.check(without("model.norm"))
    finding = the("uncovered-parameter", report)
    assert finding.consequence == "transformers leaves it on the cpu, and accelerate then refuses the map"
    assert report.forecast.skipped == "model.norm.weight would have no device"
    assert peaks(report)["GPU 0"] == 2 * 8192 + 4 * 30_976 + 64


def test_a_cut_block_stops_the_run_at_a_line_of_the_model(qwen2: Subject) -> None:
    parts = {f"model.layers.1.{name}": 0 for name in ("self_attn", "input_layernorm", "post_attention_layernorm")}
    report = qwen2.check({**without("model.layers.1"), **parts, "model.layers.1.mlp": 1})
    assert codes(report) == ["split-block", "mixed-devices"]
    finding = the("mixed-devices", report)
    assert finding.module == "model.layers.1"
    assert "computes with tensors on GPU 0 and GPU 1" in finding.message
    assert finding.consequence.startswith("the run ends in prefill, at transformers/models/qwen2/modeling_qwen2.py:")
    assert finding.consequence.endswith(": hidden_states = residual + hidden_states")
    # of 30,976 parameters the feed-forward has 18,432
    assert finding.fix == 'put it on one device: "model.layers.1": 1'
    assert report.forecast.stopped_in == "prefill"


def test_budgets_of_the_size_of_the_peaks_are_enough(qwen2: Subject) -> None:
    needed = [item.highest.peak_bytes for item in qwen2.check(WHOLE).forecast.devices]
    report = qwen2.check(WHOLE, {index: 1 + num_bytes * 8 // 7 for index, num_bytes in enumerate(needed)})
    assert report.findings == ()
    assert all(item.free_bytes is not None and item.free_bytes >= 0 for item in report.forecast.devices)


def test_out_of_memory_names_device_phase_and_missing_bytes(qwen2: Subject) -> None:
    workload = MapWorkload(prompt_tokens=4096, max_new_tokens=8)
    unlimited = qwen2.check(WHOLE, workload=workload).forecast.devices[0]
    report = qwen2.check(WHOLE, {0: 4 * MIB, 1: 999 * MIB}, workload)
    finding = the("out-of-memory", report)
    assert (finding.severity, finding.module) == ("error", "0")
    assert f"over its budget of {4 * MIB >> 20}.0 MiB" in finding.message
    assert f" of it weights and {format_bytes(unlimited.highest.activation_bytes)} activations: " in finding.message
    assert finding.consequence.startswith("the run ends in prefill, out of memory on GPU 0, in model.")
    assert report.forecast.stopped_in == "prefill"
    assert report.forecast.devices[0].free_bytes == 4 * MIB * 7 // 8 - unlimited.highest.peak_bytes


def test_every_device_that_is_too_small_is_named(qwen2: Subject) -> None:
    report = qwen2.check(WHOLE, {0: MIB, 1: MIB}, MapWorkload(prompt_tokens=4096, max_new_tokens=8))
    assert [finding.module for finding in report.findings if finding.code == "out-of-memory"] == ["0", "1"]


def test_what_the_table_shows_free_agrees_with_the_findings(qwen2: Subject) -> None:
    workload = MapWorkload(prompt_tokens=4096, max_new_tokens=8)
    needed = [item.highest.peak_bytes for item in qwen2.check(WHOLE, workload=workload).forecast.devices]
    for budgets in ((MIB, needed[1] - 2 * MIB), (needed[0], needed[1] // 2), (needed[0] // 2, MIB)):
        report = qwen2.check(WHOLE, dict(enumerate(budgets)), workload)
        short = [int(finding.module) for finding in report.findings if finding.code == "out-of-memory"]
        free = [item.free_bytes for item in report.forecast.devices]
        assert short == [index for index, num_bytes in enumerate(free) if num_bytes is not None and num_bytes < 0]


def test_the_budget_stands_beside_the_most_that_is_predicted(qwen2: Subject) -> None:
    for item in qwen2.check(WHOLE, workload=MapWorkload(prompt_tokens=4096, max_new_tokens=8)).forecast.devices:
        assert item.highest.peak_bytes == max(phase.peak_bytes for phase in item.phases)


def test_weights_over_budget_are_told_once(qwen2: Subject) -> None:
    report = qwen2.check(WHOLE, {0: 100_000})
    assert codes(report) == ["out-of-memory"]
    assert the("out-of-memory", report).consequence == "the run ends in load, out of memory on GPU 0"


def test_offloaded_layers_compute_on_the_gpu(qwen2: Subject) -> None:
    report = qwen2.check(
        {**WHOLE, **{f"model.layers.{index}": "cpu" for index in (2, 3)}, "model.norm": 0, "lm_head": 0}
    )
    assert codes(report) == ["mostly-on-cpu"]
    assert report.passed
    gpu, cpu = report.forecast.devices
    assert cpu.highest.weights_bytes == 2 * 2 * 30_976
    assert gpu.phases[-1].kv_cache_bytes >= 4 * 128 * 38


def test_gpus_with_gaps_in_their_numbers(qwen2: Subject) -> None:
    report = qwen2.check({key: 2 if device == 0 else 5 for key, device in WHOLE.items()})
    assert report.findings == ()
    assert peaks(report) == dict(zip(("GPU 2", "GPU 5"), peaks(qwen2.check(WHOLE)).values(), strict=True))


def test_a_map_of_the_cpu_alone(qwen2: Subject) -> None:
    report = qwen2.check({"": "cpu"})
    assert report.passed
    (cpu,) = report.forecast.devices
    on_gpu = qwen2.check({"": 0}).forecast.devices[0]
    assert [phase.phase for phase in cpu.phases] == ["load", "prefill", "decode"]
    assert [phase.overhead_bytes for phase in cpu.phases] == [0, 0, 0]
    assert [phase.kv_cache_bytes for phase in cpu.phases] == [phase.kv_cache_bytes for phase in on_gpu.phases]
    assert cpu.runtime_overhead_bytes == 0


def test_the_cpu_needs_room_for_more_than_weights(qwen2: Subject) -> None:
    (needed,) = peaks(qwen2.check({"": "cpu"})).values()
    weights = qwen2.check({"": "cpu"}).forecast.devices[0].phases[0].weights_bytes
    assert weights < needed
    assert qwen2.check({"": "cpu"}, {"cpu": needed}).passed
    finding = the("out-of-memory", qwen2.check({"": "cpu"}, {"cpu": needed - 1}))
    assert finding.module == "cpu"


def test_disk_computes_on_the_cpu(qwen2: Subject) -> None:
    everything = {key: "cpu" if key == "lm_head" else "disk" for key in WHOLE}
    cpu, disk = qwen2.check(everything).forecast.devices
    assert cpu.phases[-1].kv_cache_bytes > 0
    assert [phase.phase for phase in disk.phases] == ["load"]
    assert qwen2.check({"": "disk"}).forecast.skipped == "nothing is on a device that computes"


def test_a_workload_that_the_model_cannot_take(qwen2: Subject) -> None:
    with pytest.raises(RequestError, match="image"):
        qwen2.check(WHOLE, workload=MapWorkload(prompt_tokens=4096, images=((64, 64),)))


def test_a_map_of_another_model(qwen2: Subject) -> None:
    with pytest.raises(RequestError, match="the map is of another model"):
        qwen2.check({"transformer.wte": 0, "transformer.h.0": 0})


def test_two_checks_say_the_same(qwen2: Subject) -> None:
    assert qwen2.check(WHOLE) == qwen2.check(WHOLE)


def test_code_that_fails_on_one_device_too_is_not_held_against_the_map(
    qwen2: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearser = qwen2.rehearser(None)

    def generate(**_: object) -> None:
        raise KeyError("missing")

    monkeypatch.setattr(rehearser.model, "generate", generate)
    forecast = rehearser.forecast({key: Device.parse(device) for key, device in WHOLE.items()})
    (finding,) = forecast.findings
    assert (finding.code, finding.severity) == ("not-rehearsed", "warning")
    assert "KeyError" in finding.message
    assert "own code" not in finding.message
    assert forecast.skipped == "its code does not get through a rehearsal on one device either"


def test_a_model_that_transformers_itself_cannot_run(tmp_path: Path) -> None:
    broken = Subject(tmp_path, TOYS["gemma3"].config)
    broken.rehearser(None).model.config.sliding_window = None
    finding = the("not-rehearsed", broken.check({"": 0}))
    assert "fails on one device too, in transformers' own code: " in finding.message
    assert finding.consequence.endswith("and a run will fail likewise")
    assert "\n" not in finding.message


def test_code_that_fails_with_this_map_alone_is(qwen2: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearser = qwen2.rehearser(None, SHORT)

    def generate(**_: object) -> None:
        if len({str(parameter.device) for parameter in rehearser.model.parameters()}) > 1:
            raise TypeError("two devices are too many")

    monkeypatch.setattr(rehearser.model, "generate", generate)
    forecast = rehearser.forecast({key: Device.parse(device) for key, device in WHOLE.items()})
    (finding,) = forecast.findings
    assert (finding.code, finding.severity) == ("run-fails", "error")
    assert finding.consequence.endswith("TypeError: two devices are too many")
    assert [item.device.label for item in forecast.devices] == ["GPU 0", "GPU 1"]


def test_what_the_driver_takes_is_told_apart_and_part_of_the_budget(qwen2: Subject) -> None:
    need = peaks(qwen2.check(WHOLE))["GPU 0"]
    assert not qwen2.check(WHOLE, {0: need}).passed  # nothing is left for a driver
    report = qwen2.check(WHOLE, {0: need + 640 * MIB})
    share = (need + 640 * MIB) // 8
    first = report.to_document()["devices"][0]
    assert report.passed
    assert (first["peak_bytes"], first["runtime_overhead_bytes"]) == (need, share)
    assert first["free_bytes"] == 640 * MIB - share
    whole = qwen2.check(WHOLE, {0: 8 << 30}).to_document()["devices"][0]
    assert whole["runtime_overhead_bytes"] == 640 * MIB


def test_tied_weights_apart_have_one_mending(tmp_path: Path) -> None:
    tied = Subject(tmp_path, {**TOYS["qwen2"].config, "tie_word_embeddings": True})
    report = tied.check(WHOLE)
    assert codes(report) == ["split-tie", "mixed-devices"]
    assert {finding.fix.partition(": ")[2] for finding in report.findings} == {'"lm_head": 0'}


def test_contradicting_keys_are_the_reason_for_what_they_mix(qwen2: Subject) -> None:
    report = qwen2.check({"": 1, **WHOLE})
    assert the("mixed-devices", report).fix == 'replace "": 1 by its parts'
    assert qwen2.repair({"": 1, **WHOLE}).report.findings == ()


def test_parts_of_several_modules_that_belong_together_are_brought_together(tmp_path: Path) -> None:
    bert = Subject(tmp_path, TOYS["bert"].config)
    scattered: dict[str, int | str] = {
        name: index % 2
        for index, name in enumerate(name for name, module in bert.spec.modules() if not module.children)
    }
    repaired = bert.repair(scattered)
    assert repaired.report.passed
    assert set(repaired.report.device_map.values()) == {Device.parse(0), Device.parse(1)}
    assert bert.repair({key: device.map_value for key, device in repaired.document.device_map.items()}).changes == ()

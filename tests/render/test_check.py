from __future__ import annotations

from devmap_cli.checking.check import CheckReport
from devmap_cli.checking.findings import Finding
from devmap_cli.checking.forecast import DeviceForecast, Forecast, PhasePeak
from devmap_cli.checking.repair import Change
from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapWorkload
from devmap_cli.render.check import change_lines, folded, grouped, notes, peak_lines

GPU_0, GPU_1 = Device.parse(0), Device.parse(1)


def left_out(name: str, device: int = 0) -> Finding:
    return Finding(
        "uncovered-parameter",
        "error",
        name,
        f"{name} has no device (2 parameters, 1.3 GiB)",
        f'add "{name}": {device}',
    )


def test_equal_layers_are_one_finding() -> None:
    findings = [left_out(f"model.layers.{index}") for index in (0, 1, 2, 3, 10)]
    (finding,) = grouped(findings)
    assert finding.module == "model.layers.0-3,10"
    assert finding.message == "model.layers.0-3,10 has no device (2 parameters, 1.3 GiB) each"
    assert finding.fix == 'add "model.layers.0-3,10": 0'


def test_layers_of_different_devices_or_lists_are_apart() -> None:
    names = ["a.layers.0", "a.layers.1", "b.layers.0"]
    findings = [*map(left_out, names), left_out("a.layers.2", 1)]
    assert [finding.module for finding in grouped(findings)] == ["a.layers.0-1", "b.layers.0", "a.layers.2"]


def test_a_single_finding_stays_as_it_is() -> None:
    findings = [left_out("model.layers.3.mlp"), left_out("lm_head")]
    assert list(grouped(findings)) == findings


def test_numbers_of_sizes_are_no_layers() -> None:
    (finding,) = grouped([left_out("model.layers.3")])
    assert "1.3 GiB" in finding.message
    both = [left_out("model.layers.3"), left_out("model.layers.4")]
    assert [finding.module for finding in grouped(both)] == ["model.layers.3-4"]


def test_both_names_of_a_renamed_layer_are_told() -> None:
    findings = [
        Finding(
            "old-name", "warning", f"h.{index}", f"h.{index} is now model.h.{index}", f"rename it to model.h.{index}"
        )
        for index in range(3)
    ]
    (finding,) = grouped(findings)
    assert (finding.message, finding.fix) == ("h.0-2 is now model.h.0-2", "rename it to model.h.0-2")


def test_equal_changes_are_one_line() -> None:
    changes = [
        *(Change(f"model.h.{index}", GPU_0, f"was h.{index}") for index in range(3)),
        Change("model.h.3", GPU_1, "was h.3"),
        Change("h.9", None, "names no part of the model"),
    ]
    assert change_lines(changes) == [
        "fixed  model.h.0-2 → GPU 0: was h.0-2",
        "fixed  model.h.3 → GPU 1: was h.3",
        "fixed  h.9 removed: names no part of the model",
    ]


def foretold(*devices: int | str) -> CheckReport:
    """A report of a rehearsal in which each device held 7 MiB of weights."""
    load = PhasePeak("load", 7 << 20, 0, 0, 0)
    parsed = map(Device.parse, devices)
    return CheckReport({}, (), Forecast(tuple(DeviceForecast(device, None, (load,), load) for device in parsed)))


def test_what_the_driver_takes_is_explained_once() -> None:
    said = notes(foretold(0, 1, "npu:0", "cpu"), MapWorkload())
    assert said[1:] == ["runtime: a documented estimate for the driver and its libraries, on top of what is predicted"]


def test_pictures_are_told_width_first() -> None:
    workload = MapWorkload(1, 512, 8, ((480, 640),), videos=((224, 448, 16),))
    assert "(512 + 8 tokens + image 640x480 + video 448x224x16)" in notes(foretold(0), workload)[0]


def test_devices_without_a_driver_have_no_such_line() -> None:
    assert len(notes(foretold("sim:0", "cpu"), MapWorkload())) == 1


def test_a_model_that_only_reads_has_no_new_tokens() -> None:
    load, prefill = (PhasePeak(phase, 7 << 20, 0, 1 << 20, 0) for phase in ("load", "prefill"))
    device = DeviceForecast(GPU_0, None, (load, prefill), prefill)
    assert "1 × (512 tokens)" in notes(CheckReport({}, (), Forecast((device,))), MapWorkload(1, 512, 8))[0]
    stopped = Forecast((device,), stopped_in="prefill")
    assert "1 × (512 + 8 tokens)" in notes(CheckReport({}, (), stopped), MapWorkload(1, 512, 8))[0]


def test_assumptions_of_equal_layers_are_one_line() -> None:
    texts = [*(f"model.layers.{index}.router: topk of 8 scores" for index in range(3)), "argmax of 9 scores"]
    assert folded(texts) == ["model.layers.0-2.router: topk of 8 scores", "argmax of 9 scores"]


def test_peaks_in_words_leave_out_what_is_nothing() -> None:
    load, prefill = PhasePeak("load", 7 << 20, 0, 0, 0), PhasePeak("prefill", 7 << 20, 2 << 20, 0, 1 << 20)
    device = DeviceForecast(GPU_0, 16 << 20, (load, prefill), prefill)
    assert list(peak_lines([device])) == [
        "GPU 0, load: 7.0 MiB predicted = 7.0 MiB weights",
        "GPU 0, prefill: 10.0 MiB predicted = 7.0 MiB weights + 2.0 MiB KV cache + 1.0 MiB overhead",
        "GPU 0: budget 16.0 MiB, runtime 2.0 MiB, free 4.0 MiB",
    ]

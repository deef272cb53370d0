"""Simulated devices as PyTorch code sees them."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.machine import Transfer
from devmap_cli.simulation.memory import MemoryUse

MIB = 1 << 20


def test_an_integer_is_a_simulated_device_while_a_simulation_runs() -> None:
    with simulated_devices([MIB, MIB]):
        assert torch.device(1) == torch.device("sim:1")
        assert str(torch.accelerator.current_accelerator()) == "sim"
        assert torch.accelerator.device_count() == 2


def test_views_share_memory_and_new_tensors_take_it() -> None:
    with simulated_devices([64 * MIB]) as machine:
        tensor = torch.zeros(1000, device="sim:0")  # 4000 B: 8 blocks of 512
        view = tensor.view(10, 100)[2:].transpose(0, 1)
        assert machine.devices[0].use.allocated_bytes == 4096
        copy = view.contiguous()  # 800 floats: 3200 B, 7 blocks
        assert machine.devices[0].use.allocated_bytes == 4096 + 3584
        del tensor
        assert machine.devices[0].use.allocated_bytes == 4096 + 3584  # the view keeps it
        del view, copy
        assert machine.devices[0].use == MemoryUse(0, 2 * MIB)


def test_addresses_tell_devices_and_offsets_apart() -> None:
    with simulated_devices([64 * MIB] * 2):
        first, second = torch.zeros(8, device="sim:0"), torch.zeros(8, device="sim:1")
        assert first.data_ptr() != second.data_ptr()
        assert first[3:].data_ptr() - first.data_ptr() == 12


def test_in_place_operators_change_the_tensor_itself() -> None:
    with simulated_devices([64 * MIB]) as machine:
        tensor = torch.arange(6, device="sim:0").view(2, 3)
        before = machine.devices[0].use.allocated_bytes
        assert tensor.add_(1) is tensor
        tensor.transpose_(0, 1)
        assert tensor.shape == (3, 2)
        assert tensor.tolist() == [[1, 4], [2, 5], [3, 6]]
        assert machine.devices[0].use.allocated_bytes == before


def test_an_output_argument_grows() -> None:
    with simulated_devices([64 * MIB]) as machine:
        ones = torch.ones(300, 2, device="sim:0")
        out = torch.empty(0, device="sim:0")
        torch.mm(ones, ones.T, out=out)
        assert out.shape == (300, 300)
        assert out.sum().item() == 2 * 300 * 300
        assert machine.devices[0].use.allocated_bytes >= 300 * 300 * 4


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_do_not_mix(other: str) -> None:
    with simulated_devices([64 * MIB] * 2):
        here, there = torch.ones(3, device="sim:0"), torch.ones(3, device=other)
        match = f"^Expected all tensors .* same device, but found at least two devices, sim:0 and {other}!"
        with pytest.raises(RuntimeError, match=match):
            here + there
        with pytest.raises(RuntimeError, match=match):
            torch.cat([here, there])
        with pytest.raises(RuntimeError, match="Expected all tensors"):
            there.dot(here)


def test_the_error_names_the_argument() -> None:
    with (
        simulated_devices([64 * MIB] * 2),
        pytest.raises(RuntimeError, match=r"\(when checking argument for argument mat2 in method mm\)"),
    ):
        torch.mm(torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device="sim:1"))


def test_scalars_and_indices_of_the_cpu_go_with_any_device() -> None:
    with simulated_devices([64 * MIB]):
        tensor = torch.arange(4.0, device="sim:0")
        assert (tensor * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
        assert tensor[torch.tensor([3, 1])].tolist() == [3, 1]
        tensor[torch.tensor([True, False, False, True])] = 9.0
        assert tensor.tolist() == [9, 1, 2, 9]


def test_numbers_leave_the_device_only_by_a_copy() -> None:
    with simulated_devices([64 * MIB]):
        tensor = torch.ones(2, device="sim:0")
        with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
            tensor.numpy()
        assert tensor.cpu().numpy().tolist() == [1, 1]


def test_copies_between_devices_are_recorded() -> None:
    with simulated_devices([64 * MIB] * 2) as machine:
        tensor = torch.ones(5).to("sim:0")
        with machine.phase("load"):
            tensor.to("sim:1").to("sim:1").cpu()
        assert machine.transfers == [
            Transfer("cpu", "sim:0", 20, module="", phase=""),
            Transfer("sim:0", "sim:1", 20, module="", phase="load"),
            Transfer("sim:1", "cpu", 20, module="", phase="load"),
        ]


def test_random_numbers_are_the_cpus() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3), torch.rand(2)
    with simulated_devices([64 * MIB]):
        torch.manual_seed(7)
        state = torch.sim.get_rng_state()  # type: ignore[attr-defined]  # registered at run time
        first = torch.randn(3, device=0)
        assert torch.equal(first.cpu(), expected[0])
        assert torch.equal(torch.rand(2, device=0).cpu(), expected[1])
        torch.sim.set_rng_state(state)  # type: ignore[attr-defined]  # registered at run time
        assert torch.equal(torch.randn(3, device=0), first)


def test_integers_are_counted_as_cuda_counts_them() -> None:
    with simulated_devices([64 * MIB]) as machine:
        experts = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=0)
        machine.devices[0].reset_peak()
        before = machine.devices[0].use.allocated_bytes
        counts = torch.histc(experts, bins=4, min=0, max=3)
        assert (counts.tolist(), counts.dtype) == ([1, 0, 2, 1], torch.int32)
        assert machine.devices[0].peak.allocated_bytes == before + 512  # nothing but the result


def test_phases_reach_every_device() -> None:
    with simulated_devices([64 * MIB] * 2) as machine:
        with machine.phase("load"):
            kept = torch.zeros(512, dtype=torch.uint8, device="sim:1")
        with machine.phase("prefill"):
            torch.zeros(1024, dtype=torch.uint8, device="sim:1")
        assert machine.devices[0].phases == {"load": MemoryUse(0, 0), "prefill": MemoryUse(0, 0)}
        peaks = [use.allocated_bytes for use in machine.devices[1].phases.values()]
        assert peaks == [512, 1536]
        assert kept.nbytes == 512


def test_out_of_memory_is_torchs_own_error_and_leaves_the_device_usable() -> None:
    with simulated_devices([2 * MIB]) as machine:
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 out of memory. Tried to allocate 20\.00 MiB"):
            torch.zeros(3 * MIB, dtype=torch.uint8, device="sim:0")
        torch.zeros(MIB, dtype=torch.uint8, device="sim:0")
        assert machine.devices[0].peak.allocated_bytes == MIB


def test_threads_see_the_same_devices() -> None:
    with simulated_devices([64 * MIB]) as machine:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(torch.ones(4, device=0).to(torch.bfloat16)))
        thread.start()
        thread.join()
        assert str(made[0].device) == "sim:0"
        assert machine.devices[0].use.allocated_bytes == 512


def test_simulations_run_one_after_the_other() -> None:
    with simulated_devices([64 * MIB]) as first:
        left_over = torch.ones(2, device="sim:0")
    with simulated_devices([64 * MIB, 64 * MIB]) as second:
        torch.ones(2, device="sim:1")
        assert second.devices[0].peak.allocated_bytes == 0
        assert left_over.tolist() == [1, 1]  # still readable
    del left_over
    gc.collect()
    assert first.devices[0].use.allocated_bytes == 0


def test_a_simulation_within_a_simulation_is_refused() -> None:
    with (
        simulated_devices([MIB]),
        pytest.raises(RuntimeError, match="running already"),
        simulated_devices([MIB]),
    ):
        pass


def test_torch_is_usable_after_a_simulation_even_an_interrupted_one() -> None:
    with pytest.raises(KeyboardInterrupt), simulated_devices([MIB]):
        raise KeyboardInterrupt
    assert not torch.accelerator.is_available()
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(RuntimeError, match="no simulation is running"):
        torch.ones(2, device="sim:0")

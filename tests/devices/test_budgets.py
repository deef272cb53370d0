"""The `--max-memory` grammar, reserves, and budgets in bytes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets, parse_max_memory, parse_reserves, resolve_budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.units import Amount, parse_amount

GPU0, GPU1 = Device("cuda", 0), Device("cuda", 1)
GB, GIB = 10**9, 2**30


def test_gpus_and_cpu() -> None:
    assert parse_max_memory("0:10GB,1:10GB,cpu:30GB") == {
        GPU0: Amount(10 * GB),
        GPU1: Amount(10 * GB),
        CPU: Amount(30 * GB),
    }


def test_apple_gpu_and_cpu() -> None:
    assert parse_max_memory("mps:18GB,cpu:64GB") == {Device("mps"): Amount(18 * GB), CPU: Amount(64 * GB)}


def test_the_last_colon_splits() -> None:
    assert parse_max_memory("cuda:1:80%, cuda:0:-2GiB ,DISK:1TB") == {
        GPU1: parse_amount("80%"),
        GPU0: parse_amount("-2GiB"),
        DISK: Amount(1000 * GB),
    }


def example_in(error: RequestError) -> str:
    """The value that the hint gives for the option."""
    assert error.hint is not None
    match = re.search(r"--[a-z-]+ '([^']*)'", error.hint)
    assert match is not None, error.hint
    return match[1]


@pytest.mark.parametrize(
    ("text", "said", "example"),
    [
        ("0:10XB,1:10GB", "in '0:10XB': unknown unit 'XB' in '10XB'", "0:10GB,1:10GB"),
        ("0:10GB,cuda:1:10,cpu:30GB", "in 'cuda:1:10': '10' has no unit", "0:10GB,cuda:1:10GB,cpu:30GB"),
        ("0:10GB,1:,cpu:30GB", "in '1:': the size is missing", "0:10GB,1:10GB,cpu:30GB"),
        ("0:10GB,1:120%", "in '1:120%': '120%' is not a share between 0% and 100%", "0:10GB,1:80%"),
        ("0:10GB,1:-5%", "in '1:-5%': '-5%' is not a share between 0% and 100%", "0:10GB,1:80%"),
        ("0:10GB,1", "'1' is not DEVICE:SIZE", "0:10GB,1:10GB"),
        ("0:10GB,CPU", "'CPU' is not DEVICE:SIZE", "0:10GB,CPU:10GB"),
        ("10GB", "'10GB' is not DEVICE:SIZE", "0:10GB"),
        (":10GB", "':10GB' is not DEVICE:SIZE", "0:10GB"),
        ("0:5GB,cuda:1:5GB,20GB", "'20GB' is not DEVICE:SIZE", "0:5GB,cuda:1:5GB,2:20GB"),
        ("0:10GB,,cpu:30GB", "an item is empty", "0:10GB,cpu:30GB"),
        ("0:10GB,", "an item is empty", "0:10GB"),
        ("", "an item is empty", "0:10GB,1:10GB,cpu:30GB"),
    ],
)
def test_an_error_names_the_item_and_the_hint_corrects_it_in_place(text: str, said: str, example: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_max_memory(text)
    assert caught.value.message.startswith("--max-memory: ")
    assert said in caught.value.message
    assert example_in(caught.value) == example
    parse_max_memory(example)  # the hint can be followed


def test_an_unknown_unit_asks_which_is_meant() -> None:
    with pytest.raises(RequestError) as caught:
        parse_max_memory("0:10XB")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("which unit is meant? ")
    assert "powers of 1000" in caught.value.hint


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(RequestError) as caught:
        parse_max_memory("0:10GB,gpu1:10GB")
    assert caught.value.message == "--max-memory: in 'gpu1:10GB': 'gpu1' is no device"
    assert caught.value.hint == "devices are 0, 1 and so on, cuda:0, npu:0, xpu:0, mps, cpu and disk"


@pytest.mark.parametrize("text", ["0:10GB,cuda:0:12GB", "cuda:0:10GB,0:12GB", "cpu:1GB,CPU:2GB", "mps:1GB,mps:0:1GB"])
def test_a_device_is_given_once(text: str) -> None:
    with pytest.raises(RequestError, match="a second time") as caught:
        parse_max_memory(text)
    assert repr(text.split(",")[1]) in caught.value.message


def test_reserves() -> None:
    assert parse_reserves([]) == {}
    assert parse_reserves(["0=2GiB", "cuda:1=500MB,cpu=10%"]) == {
        GPU0: Amount(2 * GIB),
        GPU1: Amount(500_000_000),
        CPU: parse_amount("10%"),
    }
    assert parse_reserves(["0:2GiB"]) == {GPU0: Amount(2 * GIB)}


@pytest.mark.parametrize(
    ("items", "said", "example"),
    [
        (["0=2GiB", "1=2XB"], "--reserve: in '1=2XB': unknown unit 'XB'", "0=2GiB,1=2GB"),
        (["0"], "--reserve: '0' is not DEVICE=SIZE", "0=10GB"),
        (["2GiB"], "--reserve: '2GiB' is not DEVICE=SIZE", "0=2GiB"),
    ],
)
def test_a_wrong_reserve_is_named_as_it_was_written(items: list[str], said: str, example: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_reserves(items)
    assert said in caught.value.message
    assert example_in(caught.value) == example
    parse_reserves([example])


def test_budgets_in_placing_order() -> None:
    budgets = Budgets.of({DISK: 1, GPU1: 2, CPU: 3, GPU0: 4})
    assert budgets.devices == (GPU1, GPU0, CPU, DISK)
    assert budgets.accelerators == (GPU1, GPU0)
    assert budgets.tiers == (CPU, DISK)
    assert budgets[CPU] == 3


def test_relative_amounts_and_reserves_refer_to_the_total() -> None:
    amounts = parse_max_memory("0:80%,1:-2GiB,cpu:30GB")
    reserves = parse_reserves(["0=1GiB", "1=25%"])
    budgets = resolve_budgets(amounts, reserves, {GPU0: 10 * GIB, GPU1: 8 * GIB})
    # 80 % of 10 GiB less 1 GiB; 8 GiB less 2 GiB less a quarter of 8 GiB; cpu as it says
    assert dict(budgets) == {GPU0: 7 * GIB, GPU1: 4 * GIB, CPU: 30 * GB}


def test_a_reserve_larger_than_the_budget_leaves_nothing() -> None:
    budgets = resolve_budgets(parse_max_memory("0:1GB"), parse_reserves(["0=2GB"]), {})
    assert dict(budgets) == {GPU0: 0}


@pytest.mark.parametrize(("amount", "reserve"), [("80%", None), ("-2GiB", None), ("10GB", "10%")])
def test_a_share_of_a_device_that_is_not_here(amount: str, reserve: str | None) -> None:
    reserves = parse_reserves([f"1={reserve}"] if reserve else [])
    with pytest.raises(SurroundingsError) as caught:
        resolve_budgets(parse_max_memory(f"1:{amount}"), reserves, {GPU0: GB})
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("GPU 1 is not on this machine")
    example = "--reserve '1=2GB'" if reserve else "--max-memory '1:10GB'"
    assert caught.value.hint == f"give it in bytes, for example {example}"


def test_all_but_an_amount_is_not_called_a_share() -> None:
    with pytest.raises(SurroundingsError, match=r"so all but 1.00 GiB \(--reserve\) of it is unknown"):
        resolve_budgets(parse_max_memory("1:10GB"), parse_reserves(["1=-1GiB"]), {})


@pytest.mark.parametrize(
    ("text", "corrected"),
    [("0=5GB", "0:5GB"), ("0:1GB,cuda:1=5GB", "0:1GB,cuda:1:5GB"), ("cuda:0", "cuda:0:10GB")],
)
def test_the_other_separator_is_corrected(text: str, corrected: str) -> None:
    with pytest.raises(RequestError, match="is not DEVICE:SIZE") as caught:
        parse_max_memory(text)
    assert example_in(caught.value) == corrected


@pytest.mark.parametrize("text", ["npu:0:1GB,0:1GB", "0:1GB,xpu:0:1GB", "cuda:0:1GB,mps:1GB"])
def test_accelerators_are_of_one_kind(text: str) -> None:
    with pytest.raises(RequestError, match="mixes kinds of accelerators") as caught:
        parse_max_memory(text)
    assert caught.value.hint


def test_a_reserve_needs_a_budget() -> None:
    with pytest.raises(RequestError, match="GPU 1, which has no budget") as caught:
        resolve_budgets(parse_max_memory("0:1GB,cpu:1GB"), parse_reserves(["1=1GB"]), {})
    assert caught.value.hint == "devices with a budget: 0, cpu"


@given(
    st.sampled_from(["cuda", "npu", "xpu"]).flatmap(
        lambda kind: st.dictionaries(
            st.builds(Device, st.just(kind), st.integers(0, 20)) | st.sampled_from([CPU, DISK]),
            st.integers(1, 10**15),
            min_size=1,
            max_size=6,
        )
    )
)
def test_any_budgets_survive_being_written_out(sizes: dict[Device, int]) -> None:
    text = ",".join(f"{device}:{size}B" for device, size in sizes.items())
    assert parse_max_memory(text) == {device: Amount(size) for device, size in sizes.items()}


@given(st.text(alphabet="01:,cudpGB%=- .", max_size=16))
def test_any_text_is_read_or_refused_with_a_hint(text: str) -> None:
    try:
        parse_max_memory(text)
    except RequestError as error:
        assert error.hint  # noqa: PT017 - an accepted text is as good

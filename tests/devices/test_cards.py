"""The table of cards, names of cards, and `--gpus`."""

from __future__ import annotations

from collections import Counter

import pytest

from devmap_cli.devices.cards import GIB, MAX_GPUS, cards, cards_named, parse_gpus
from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError

CARDS = cards()
BY_NAME = {card.name: card for card in CARDS}


def listed(text: str) -> list[str]:
    return [f"{device} {card.name}" for device, card in parse_gpus(text).items()]


def refusal(text: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_gpus(text)
    return caught.value


def test_the_table_is_large_and_names_are_unique() -> None:
    assert len(CARDS) >= 60
    assert Counter(card.name for card in CARDS).most_common(1)[0][1] == 1
    assert {card.vendor for card in CARDS} == {"NVIDIA", "AMD", "Intel", "Huawei", "Apple"}


def test_figures_are_plausible() -> None:
    for card in CARDS:
        share = card.usable_bytes / card.label_bytes
        low, high = (0.66, 0.76) if card.kind == "mps" else (0.84, 1)
        assert low < share < high, card
        assert 5 * GIB < card.usable_bytes <= 384 * GIB, card
        assert 60e9 < card.bandwidth_bytes_per_second <= 8000e9, card
        assert card.num_gpus in (1, 2, 4), card
        assert card.source, card
        assert card.pcie is None or (card.pcie[0] in (3, 4, 5) and card.pcie[1] in (8, 16)), card
        assert card.link_bytes_per_second is None or 50e9 <= card.link_bytes_per_second <= 1800e9, card


def test_rates_are_plausible() -> None:
    for card in CARDS:
        rates = dict(card.tflops)
        assert all(1 < rate <= 5500 for rate in rates.values()), card
        # units for narrow types are never slower than those for wide ones
        for wide, narrow in [("fp32", "fp16"), ("fp32", "bf16"), ("fp16", "int8"), ("bf16", "fp8")]:
            assert rates.get(wide, 0) <= rates.get(narrow, 5500), card


def test_hardware_lacks_what_its_architecture_lacks() -> None:
    for card in CARDS:
        rates = dict(card.tflops)
        assert (card.compute_capability is not None) == (card.vendor == "NVIDIA"), card
        if card.compute_capability is not None:
            assert "bf16" not in rates or card.compute_capability >= (8, 0), card
            assert "fp8" not in rates or card.compute_capability >= (8, 9), card
            assert card.compute_capability != (6, 1) or "fp16" not in rates, card
        if card.kind == "mps":
            assert card.pcie is None, card
            assert card.link_bytes_per_second is None, card


def test_a_full_name_means_its_card() -> None:
    for card in CARDS:
        for text in (card.name, card.name.lower(), card.name.replace(" ", "-").upper()):
            assert cards_named(text) == (card,)


def test_with_its_memory_every_alias_means_one_card() -> None:
    for card in CARDS:
        for alias in card.aliases:
            assert cards_named(f"{alias} {card.label_bytes // GIB}GB") == (card,)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("t4", "T4"),
        ("a100-80gb", "A100 SXM 80GB"),
        ("A100 80G", "A100 SXM 80GB"),
        ("A100 40GiB", "A100 40GB"),
        ("H100", "H100 SXM"),
        ("h100_pcie", "H100 PCIe"),
        ("rtx 3090", "RTX 3090"),
        ("RTX3090", "RTX 3090"),
        ("RTX 3090 24GB", "RTX 3090"),
        ("4090", "RTX 4090"),
        ("4070 ti super", "RTX 4070 Ti Super"),
        ("4090 mobile", "RTX 4090 Laptop"),
        ("A6000", "RTX A6000"),
        ("6000 Ada", "RTX 6000 Ada"),
        ("7900xtx", "RX 7900 XTX"),
        ("w7900", "Radeon PRO W7900"),
        ("a770", "Arc A770"),
        ("310P 24GB", "Ascend 310P 24GB"),
        ("m2-max-64gb", "M2 Max 64GB"),
        # as drivers write them
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
    ],
)
def test_names_as_they_are_written(text: str, name: str) -> None:
    assert [card.name for card in cards_named(text)] == [name]


@pytest.mark.parametrize(
    "text", ["2xT4,1xA10", "2×T4,A10", "2 x T4, 1 x a10", "T4x2,A10", "T4 x 2 , A10", "2XT4,1*A10", "T4,T4,A10"]
)
def test_counts_as_they_are_written(text: str) -> None:
    assert listed(text) == ["cuda:0 T4", "cuda:1 T4", "cuda:2 A10"]


def test_an_x_in_a_name_is_no_count() -> None:
    assert listed("2x7900XTX") == ["cuda:0 RX 7900 XTX", "cuda:1 RX 7900 XTX"]
    assert "7800xtx" in refusal("7800xtx").message


def test_a_card_with_several_gpus_is_several_devices() -> None:
    assert listed("MI250X,MI210") == ["cuda:0 MI250X", "cuda:1 MI250X", "cuda:2 MI210"]
    assert len(parse_gpus("2xA16")) == 8


def test_kinds_of_devices() -> None:
    assert list(parse_gpus("2xB580")) == [Device("xpu", 0), Device("xpu", 1)]
    assert list(parse_gpus("910B 64GB")) == [Device("npu", 0)]
    assert list(parse_gpus("M4 Max 128GB")) == [Device("mps")]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("A100", "'A100' can be A100 40GB or A100 SXM 80GB", "--gpus 'A100 40GB'"),
        ("T4,2x3080", "'3080' can be RTX 3080 10GB or RTX 3080 12GB", "--gpus 'T4,2xRTX 3080 10GB'"),
        ("rtx 6000", "can be Quadro RTX 6000 or RTX 6000 Ada", "--gpus 'Quadro RTX 6000'"),
        ("2xA100 80GB,1xT44", "no card is called 'T44'", "--gpus '2xA100 80GB,T4'"),
        ("3x RTX 3091", "no card is called 'RTX 3091'", "did you mean --gpus '3xRTX 3090'"),
        ("A100-60GB", "no card is called 'A100-60GB'", "--gpus 'A100 40GB'; also close: A100 SXM 80GB"),
        ("nothing like it", "no card is called 'nothing like it'", "--max-memory '0:24GB'"),
        ("{}", "no card is called '{}'", "--max-memory"),
        ("", "an item is empty in ''", "--gpus '2xT4,1xA10'"),
        ("T4,,A10", "an item is empty", "--gpus 'T4,A10'"),
        ("0xT4", "'0xT4' asks for 0 cards", "--gpus '2xT4'"),
        ("9999xT4", f"from 1 to {MAX_GPUS} devices", "--gpus '2xT4'"),
        ("T4,B580", "T4 and Arc B580 cannot be used together", "--gpus '2xT4'"),
        ("T4,MI210", "cannot be used together", "--gpus '2xT4'"),
        ("2xM2 Max 64GB", "a Mac has one GPU, 2 are given", "--gpus 'M2 Max 64GB'"),
    ],
)
def test_refusals_name_the_item_and_a_way_out(text: str, message: str, hint: str) -> None:
    error = refusal(text)
    assert message in error.message
    assert hint in (error.hint or "")


def test_the_hint_of_a_refusal_is_accepted() -> None:
    for text in ("A100", "T4,2x3080", "2xA100 80GB,1xT44", "m1", "910b", "3x RTX 3091"):
        hint = refusal(text).hint or ""
        assert parse_gpus(hint.split("'")[1])


def test_published_totals() -> None:
    # 14.56, 79.1 and 139.72 GiB as torch reports them; two thirds of 16 GB and three quarters of 64 GB as Metal does
    expected = {"T4": 14.56, "H100 SXM": 79.1, "H200": 139.72, "M1 16GB": 32 / 3, "M2 Max 64GB": 48}
    for name, usable_gib in expected.items():
        assert BY_NAME[name].usable_bytes == pytest.approx(usable_gib * GIB, abs=1)
    assert BY_NAME["T4"].usable_is_published
    assert not BY_NAME["A16"].usable_is_published


def test_rates_of_types_that_the_hardware_lacks() -> None:
    assert BY_NAME["T4"].peak_flops("float16") == 65e12
    assert BY_NAME["T4"].peak_flops("bfloat16") == 8.1e12  # no bf16 before Ampere: computed in fp32
    assert BY_NAME["A100 40GB"].peak_flops("float8_e4m3fn") == 312e12
    assert BY_NAME["P40"].peak_flops("float16") == 12e12
    assert BY_NAME["V100 SXM 32GB"].peak_flops("int8") is None
    assert BY_NAME["RTX 4090 Laptop"].peak_flops("float16") is None


def test_pcie() -> None:
    # 16 lanes × 8 GT/s × 128/130 / 8 = 15.75 GB/s
    assert BY_NAME["T4"].pcie_bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert BY_NAME["M1 16GB"].pcie_bytes_per_second is None

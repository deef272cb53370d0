"""The table of cards, names of cards, and `--gpus`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert len(CARDS) >= 250
    assert Counter(card.name for card in CARDS).most_common(1)[0][1] == 1
    assert {card.vendor for card in CARDS} == {"NVIDIA", "AMD", "Intel", "Huawei", "Apple"}


def test_figures_are_plausible() -> None:
    for card in CARDS:
        share = card.usable_bytes / card.label_bytes
        shares_memory = card.kind == "mps" or "8060S" in card.name
        low, high = (0.66, 0.76) if shares_memory else (0.82, 1)
        assert low < share < high, card
        assert 3 * GIB < card.usable_bytes <= 384 * GIB, card
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


def test_a_name_written_together_or_backwards_means_its_card() -> None:
    for card in CARDS:
        for text in (card.name.replace(" ", "_"), f"{card.vendor} {card.name}", " ".join(card.name.split()[::-1])):
            assert cards_named(text) == (card,)
    together = [card for card in CARDS if cards_named(card.name.replace(" ", "")) == (card,)]
    unread = {card.name for card in CARDS} - {card.name for card in together}
    # where memory or a word that does not matter stands between others
    assert unread == {
        "A800 40GB Active",
        "Radeon 8060S 128GB",
        "Data Center GPU Max 1100",
        "Data Center GPU Max 1550",
    }


@given(st.text(max_size=300) | st.text("0123456789xgbtirsaGB -,*", max_size=300))
def test_any_text_is_read_or_refused_with_a_hint(text: str) -> None:
    try:
        found = bool(parse_gpus(text))
    except RequestError as error:
        found = bool(error.hint)
    assert found


def test_with_its_memory_every_alias_means_one_card() -> None:
    for card in CARDS:
        for alias in card.aliases:
            with_memory = alias if alias.endswith("GB") else f"{alias} {card.label_bytes // GIB}GB"
            assert cards_named(with_memory) == (card,)


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
        ("NVIDIA GH200 480GB", "GH200 96GB"),  # its name counts the CPU's memory
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GeForce GTX 1660 SUPER", "GTX 1660 Super"),
        ("NVIDIA TITAN V", "Titan V"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GB10", "GB10"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250"),
        ("Ascend910B4", "Ascend 910B 32GB"),
        ("Ascend910_9391", "Ascend 910C"),
        ("Ascend310P3", "Ascend 310P 24GB"),
        # written together, short, or in another order
        ("4060Ti16GB", "RTX 4060 Ti 16GB"),
        ("RTX4060Ti-16G", "RTX 4060 Ti 16GB"),
        ("4060ti 16", "RTX 4060 Ti 16GB"),
        ("A100-80", "A100 SXM 80GB"),
        ("A100PCIe80GB", "A100 PCIe 80GB"),
        ("H100NVL94GB", "H100 NVL"),
        ("h100_sxm5_80gb", "H100 SXM"),
        ("A10G24GB", "A10G"),  # whose G is no unit
        ("a10g", "A10G"),
        ("M4Pro48GB", "M4 Pro 48GB"),
        ("4080S", "RTX 4080 Super"),
        ("4070TiS", "RTX 4070 Ti Super"),
        ("L40S", "L40S"),
        ("RTX PRO 5000 Blackwell", "RTX PRO 5000 Blackwell"),  # there is another with 72 GB
        ("RTX PRO 5000 72GB", "RTX PRO 5000 Blackwell 72GB"),
        ("TeslaT4", "T4"),
        ("A10040GB", "A100 40GB"),
        ("RTX306012GB", "RTX 3060 12GB"),
        ("M116GB", "M1 16GB"),
        ("V100SXM16GB", "V100 SXM 16GB"),
        ("RTXA6000", "RTX A6000"),
        ("QuadroRTX6000", "Quadro RTX 6000"),
        ("4090 RTX", "RTX 4090"),
        ("radeon7900xtx", "RX 7900 XTX"),
        ("PRO 6000", "RTX PRO 6000 Blackwell"),
        ("Laptop RTX 4090", "RTX 4090 Laptop"),
        ("PCIe H100", "H100 PCIe"),
        ("A100 80GB Tensor Core GPU", "A100 SXM 80GB"),
        ("DGX Spark", "GB10"),
        ("Ryzen AI Max+ 395", "Radeon 8060S 128GB"),
        ("MI250X 128GB", "MI250X"),  # of both its GPUs
    ],
)
def test_names_as_they_are_written(text: str, name: str) -> None:
    assert [card.name for card in cards_named(text)] == [name]


@pytest.mark.parametrize(
    "text", ["AMD T4", "Radeon 4090", "Intel A100 40GB", "A100 96GB", "RTX 4090 48GB", "H100 MIG 1g"]
)
def test_another_makers_card_or_other_memory_is_not_meant(text: str) -> None:
    assert cards_named(text) == ()


@pytest.mark.parametrize(
    ("text", "first", "among"),
    [
        ("T5", "T4", "T4"),
        ("RTX 4080 Ultra", "RTX 4080", "RTX 4080 Super"),
        ("RTX 4080 Supr", "RTX 4080 Super", "RTX 4080"),
        ("RTX 4095", "RTX 4090", "RTX 4080"),
        ("A101", "A100 40GB", "A100 SXM 80GB"),
        ("h100-94gb", "H100 NVL", "H100 SXM"),
        ("MI300", "MI300A", "MI300X"),
        ("7800xtx", "RX 7800 XT", "RX 7900 XTX"),
        ("NVIDIA A100X", "A100 40GB", "A100 SXM 80GB"),
        ("Intel Arc Pro A60", "Arc Pro B60", "Arc Pro B50"),
        ("Tesla M40 24GB", "P40", "A40"),  # no Apple M4, which is nearer by letters
        ("RTX PRO 4001 Blackwell", "RTX PRO 4000 Blackwell", "RTX PRO 4500 Blackwell"),
        ("GTX 970", "GTX 1060 6GB", "GTX 1070"),
    ],
)
def test_guesses_share_words_and_digits(text: str, first: str, among: str) -> None:
    hint = refusal(text).hint or ""
    guess, _, rest = hint.removeprefix("did you mean --gpus '").partition("'")
    assert guess == first
    assert f" {among}," in rest.replace(";", ",") or among == first


@pytest.mark.parametrize("text", ["Gaudi 2", "TPU v5e", "mac studio", "PG506-230", "AMD Radeon Graphics", "♥"])
def test_what_is_like_no_card_has_no_guess(text: str) -> None:
    assert (refusal(text).hint or "").startswith("for a card that is not in the table")


@pytest.mark.parametrize(
    "text",
    ["2xT4,1xA10", "2×T4,A10", "2 x T4, 1 x a10", "T4x2,A10", "T4 x 2 , A10", "2XT4,1*A10", "T4,T4,A10", "2 T4,A10"],
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

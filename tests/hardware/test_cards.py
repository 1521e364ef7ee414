import pytest

from mtuner_jax.hardware import cards


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_dense_bfloat16_peaks(kind, tflops):
    assert cards.peak_flops_per_s(kind) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "kind",
    ["cpu", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "NVIDIA GB200", "NVIDIA GH200"],
)
def test_other_devices_have_no_peak(kind):
    assert cards.peak_flops_per_s(kind) is None


@pytest.mark.parametrize("card", cards.CARDS, ids=lambda card: card.title)
def test_the_name_of_a_card_finds_its_own_row(card):
    assert cards.peak_flops_per_s(card.device) == card.peak_flops_per_s
    assert card.matmul_flops_per_s.value[-1][1] < card.peak_flops_per_s
    others = [other for other in cards.CARDS if other is not card]
    assert card.device not in {other.device for other in others}


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        ("NVIDIA H200", 9.0),
        ("NVIDIA A100-PCIE-40GB", 8.0),
        ("cpu", 0.0),
        ("", 0.0),
    ],
)
def test_compute_capability_is_told_by_the_name(device, capability):
    assert cards.capability(device) == capability

"""torch's own samples for scaled_dot_product_attention: equal to torch's result, or refused for a listed reason."""

import pytest
import torch
from flashcore_attn import UnsupportedError, scaled_dot_product_attention

pytest.importorskip("expecttest", reason="torch's samples need expecttest")
from torch.testing._internal.common_methods_invocations import op_db

NAME = "nn.functional.scaled_dot_product_attention"
#: What may be refused of torch's samples.
REFUSED = ("dropout_p is 0.5", "a bias is not fused")


def results(function, sample, gradient, dtype):
    """What a function gives for one of torch's samples in a dtype: the output, and the gradients where wanted."""
    inputs = [x.detach().to(dtype).requires_grad_(gradient) for x in (sample.input, *sample.args)]
    kwargs = {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in sample.kwargs.items()
    }
    o = function(*inputs, **kwargs)
    if not gradient:
        return [o]
    grad = torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape).to(dtype)
    return [o.detach(), *torch.autograd.grad(o, inputs, grad)]


def floor(sample, dtype, truth):
    """What rounding may do to a result: rounding of the result itself, and of the scores, to which weights are more
    sensitive the larger the scores are. Sums are float32 where they are not float64."""
    norms = [x.detach().double().norm(dim=-1).max() for x in (sample.input, sample.args[0])]
    score = norms[0] * norms[1] * sample.kwargs.get("scale", sample.input.size(-1) ** -0.5)
    sums = torch.finfo(dtype if dtype == torch.float64 else torch.float32).eps
    return (4 * torch.finfo(dtype).eps + sums * score) * max(sample.args[1].abs().max(), truth.abs().nan_to_num().max())


def as_near_to_the_truth(ours, theirs, truth, floor):
    """At most twice as far from float64 as torch is, plus what rounding may do."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    off, theirs_off = ((x.double() - truth).nan_to_num().abs().max() for x in (ours, theirs))
    assert float(off) <= 2 * float(theirs_off) + float(floor)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_torchs_samples_are_equal_or_refused_for_a_listed_reason(dtype, gradient):
    (info,) = (info for info in op_db if info.name == NAME)
    equal = 0
    for sample in info.sample_inputs("cpu", dtype):
        try:
            ours = results(scaled_dot_product_attention, sample, gradient, dtype)
        except UnsupportedError as error:
            assert any(reason in str(error) for reason in REFUSED), error
            continue
        theirs, truth = (results(info.op, sample, gradient, kind) for kind in (dtype, torch.float64))
        for found in zip(ours, theirs, truth, strict=True):
            as_near_to_the_truth(*found, floor(sample, dtype, found[2]))
        equal += 1
    assert equal >= 12

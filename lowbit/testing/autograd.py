"""Products with the tensor as a weight, and their gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.testing.comparison import relative_error, same, values
from lowbit.testing.subject import Subject

PRODUCTS = (
    ((5, 3), 24, 96),
    ((7,), 13, 101),
    ((), 1, 33),
    ((1, 1), 1, 1),
    ((0,), 8, 96),
    ((4,), 0, 96),
)
"""Tokens, N, K: even; K to be padded and odd sizes; one token; one of each; no tokens; no rows."""


class AutogradContract(Subject):
    """`F.linear` is the product of the values, and gradients reach the input, the bias, and a trainable weight.

    The reference is plain PyTorch in float64 on `dequantize()` and `rounded_input(x)`.
    """

    def test_linear_is_the_product_of_the_values(self) -> None:
        for tokens, n, k in PRODUCTS:
            weight, x = self.make((n, k)), values((*tokens, k), 1)
            rounded = (self.rounded_input(x) if x.numel() else x).double()
            for bias in (values((n,), 2), None):
                y = F.linear(x, weight, bias)
                assert type(y) is torch.Tensor and y.dtype == x.dtype
                wide = None if bias is None else bias.double()
                expected = F.linear(rounded, weight.dequantize().double(), wide)
                error = relative_error(y, expected)
                assert error < self.tolerance, f"tokens {tokens}, weight [{n}, {k}]: {error}"

    def test_gradients_of_input_bias_and_weight(self) -> None:
        for tokens, n, k in PRODUCTS:
            weight = self.make((n, k))
            if self.trainable:
                weight.requires_grad_()
            x = values((*tokens, k), 1).requires_grad_()
            bias = values((n,), 2).requires_grad_()
            y = F.linear(x, weight, bias)
            upstream = values(y.shape, 3)
            y.backward(upstream)
            expected = self._expected_gradients(weight, x, upstream)
            if self.trainable:
                assert type(weight.grad) is torch.Tensor and weight.grad.dtype == weight.dtype
            else:
                assert weight.grad is None, "a frozen weight gets no gradient"
            found = {"input": x.grad, "bias": bias.grad, "weight": weight.grad}
            for name, gradient in expected.items():
                own = found[name]
                assert own is not None, f"the {name} got no gradient"
                error = relative_error(own, gradient)
                limit = self.gradient_tolerance
                assert error < limit, f"{name}, tokens {tokens}, weight [{n}, {k}]: {error}"

    def test_output_changes_in_place(self) -> None:
        """As `nn.ReLU(inplace=True)` and `hidden += residual` change it. Autograd refuses a view that an autograd
        Function made."""
        for tokens, n, k in PRODUCTS[:4]:
            weight = self.make((n, k))
            for bias in (values((n,), 2), None):
                x = values((*tokens, k), 1).requires_grad_()
                y = F.linear(x, weight, bias)
                expected = y.detach() * 2 + 1
                upstream = values(y.shape, 3)
                y.mul_(2).add_(1).backward(upstream)
                assert torch.equal(y, expected)
                gradient = self._expected_gradients(weight, x, 2 * upstream)["input"]
                assert x.grad is not None
                error = relative_error(x.grad, gradient)
                assert error < self.gradient_tolerance, f"tokens {tokens}, weight [{n}, {k}]"

    def _expected_gradients(self, weight: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
        n, k = weight.shape
        tokens = math.prod(x.shape[:-1])
        flat = upstream.reshape(tokens, n).double()
        rounded = (self.rounded_input(x.detach()) if x.numel() else x).reshape(tokens, k)
        expected = {
            "input": (flat @ weight.detach().dequantize().double()).view(x.shape),
            "bias": flat.sum(0),
        }
        if self.trainable:
            gradient = flat.t() @ rounded.double()
            expected["weight"] = torch.where(self.passes(weight.detach()), gradient, 0.0)
        return expected

    def test_an_optimizer_changes_a_trainable_weight_only(self) -> None:
        """`torch.optim.SGD`, 3 steps towards a smaller output."""
        layer = nn.Linear(100, 24, bias=False)
        layer.weight = nn.Parameter(self.make((24, 100)), requires_grad=self.trainable)
        before, x = layer.weight.detach().clone(), values((8, 100), 1)
        scale = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*layer.parameters(), scale], lr=0.5)
        losses = []
        for _ in range(3):
            loss = (layer(x) * scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if self.trainable:
                scale.grad = None  # the weight alone must lower the loss
            optimizer.step()
            losses.append(float(loss.detach()))
        after = layer.weight.detach()
        assert type(after) is type(before), "the weight stays of its class"
        assert same(after, before) is not self.trainable
        if self.trainable:
            assert losses[-1] < losses[0], losses

    def test_backward_after_an_update_of_the_weight(self) -> None:
        """PyTorch refuses this backward pass for a plain weight. A weight that was rounded in the forward pass may also
        give the gradient of the values that the output saw, but never that of the new values."""
        if not self.trainable:
            return
        weight, x = nn.Parameter(self.make((24, 96))), values((5, 96), 1).requires_grad_()
        y, upstream = F.linear(x, weight), values((5, 24), 3)
        expected = self._expected_gradients(weight, x, upstream)["input"]
        weight.grad = torch.ones(24, 96, dtype=weight.dtype)
        torch.optim.SGD([weight], lr=9.0).step()
        try:
            y.backward(upstream)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert x.grad is not None
            assert relative_error(x.grad, expected) < self.gradient_tolerance

    def test_non_contiguous_inputs(self) -> None:
        weight = self.make((24, 101))
        for x in (values((101, 6), 1).t(), values((6, 3, 101), 1).transpose(0, 1)):
            assert relative_error(F.linear(x, weight), F.linear(x.contiguous(), weight)) < 1e-6

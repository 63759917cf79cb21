"""The fused layer's small operations in plain torch: what `core.finetune.kernels` does on a GPU, on any device.

M: tokens of a micro-batch; R: LoRA rank. A "sectioned" matrix [M, N] holds several projections side by side, as SGLang
fuses them (q, k, v; gate, up), with `sections` their widths; their LoRA factors A are stacked to [G * R, K], B to
[N, R], and what A makes of the input to [M, G * R].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

IGNORED = -100


def _split(x: torch.Tensor, sections: Sequence[int], dim: int) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = list(torch.split(x, list(sections), dim))
    return parts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, rstd: torch.Tensor) -> None:
    """out [M, H] = x / rms(x) * weight; rstd fp32 [M] = 1 / rms(x)."""
    value = x.float()
    rstd.copy_((value.square().mean(-1) + eps).rsqrt())
    out.copy_(value * rstd[:, None] * weight.float())


def rms_norm_backward(
    gradient: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor] | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    normed: torch.Tensor | None,
) -> None:
    """out = residual + the gradient of x, where the norm's output has the gradient `gradient` + t @ a with (t [M, R'],
    a [R', H]) = `lora`; normed: the norm's output once more. out may be residual; gradient is left undefined."""
    total = gradient.float()
    if lora is not None:
        total = total + lora[0].float() @ lora[1].float()
    scaled = x.float() * rstd[:, None]
    inner = total * weight.float()
    value = rstd[:, None] * (inner - scaled * (inner * scaled).mean(-1, keepdim=True))
    out.copy_(value if residual is None else value + residual.float())
    if normed is not None:
        normed.copy_(scaled * weight.float())


def project(x: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, R'] = x [M, K] @ a [R', K] transposed."""
    out.copy_(x @ a.t())


def project_sections(x: torch.Tensor, b: torch.Tensor, sections: Sequence[int], out: torch.Tensor) -> None:
    """out [M, G * R]: each section of x [M, N] times its rows of b [N, R]."""
    out.copy_(torch.cat([p @ q for p, q in zip(_split(x, sections, 1), _split(b, sections, 0), strict=True)], 1))


def accumulate_a(t: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """gradient fp32 [R', N] += t [M, R'] transposed @ x [M, N]."""
    gradient += (t.t() @ x).float()


def accumulate_b(x: torch.Tensor, t: torch.Tensor, sections: Sequence[int], gradient: torch.Tensor) -> None:
    """gradient fp32 [N, R] += each section of x [M, N] transposed @ its columns of t [M, G * R]."""
    parts = zip(_split(x, sections, 1), t.chunk(len(sections), 1), strict=True)
    gradient += torch.cat([p.t() @ q for p, q in parts]).float()


def _sectioned(xa: torch.Tensor, b: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
    """fp32 [M, N]: what LoRA adds to a sectioned product."""
    parts = zip(xa.chunk(len(sections), 1), _split(b, sections, 0), strict=True)
    return torch.cat([p.float() @ q.float().t() for p, q in parts], 1)


def add_residual(
    base: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> None:
    """out [M, N] = residual + base + xa [M, R] @ b [N, R] transposed."""
    out.copy_(residual.float() + base.float() + xa.float() @ b.float().t())


def rotate_qkv(
    base: torch.Tensor,
    bias: torch.Tensor | None,
    xa: torch.Tensor,
    b: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    sections: Sequence[int],
    out: torch.Tensor,
    raw: torch.Tensor | None,
) -> None:
    """out [M, q + 2 kv]: base + bias + LoRA, heads of q and k normalised (weights and eps in `norms`; what they were
    before goes to raw [M, q + kv]) and rotated by cosine, sine fp32 [M, D / 2]."""
    value = base.float() + _sectioned(xa, b, sections)
    if bias is not None:
        value = value + bias.float()
    q, k, v = _split(value, sections, 1)
    half = cosine.shape[1]
    if norms is not None:
        assert raw is not None
        raw.copy_(torch.cat([q, k], 1))
        q, k = (
            F.rms_norm(part.reshape(len(part), -1, 2 * half), (2 * half,), weight.float(), norms[2]).reshape(part.shape)
            for part, weight in ((q, norms[0]), (k, norms[1]))
        )
    out.copy_(torch.cat([_rotate(q, cosine, sine), _rotate(k, cosine, sine), v], 1))


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.view(len(x), -1, 2, cosine.shape[1]).unbind(2)
    c, s = cosine[:, None], sine[:, None]
    return torch.stack([first * c - second * s, second * c + first * s], 2).reshape(x.shape)


def rotate_qkv_backward(
    gradient: torch.Tensor,
    raw: torch.Tensor | None,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    sections: Sequence[int],
) -> None:
    """gradient [M, q + 2 kv] of `rotate_qkv`'s output becomes that of its sum, in place."""
    dim = 2 * cosine.shape[1]
    q, k, _ = _split(gradient, sections, 1)
    for number, part in enumerate((q, k)):
        value = _rotate(part.float(), cosine, -sine)
        if norms is not None:
            assert raw is not None
            x = _split(raw, sections[:2], 1)[number].float().view(len(part), -1, dim)
            rstd = (x.square().mean(-1, keepdim=True) + norms[2]).rsqrt()
            inner = value.view(x.shape) * norms[:2][number].float()
            scaled = x * rstd
            value = (rstd * (inner - scaled * (inner * scaled).mean(-1, keepdim=True))).view(part.shape)
        part.copy_(value)


def swiglu(gate_up: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, I] = silu(gate) * up, LoRA added to both halves of gate_up [M, 2 I]."""
    width = out.shape[1]
    gate, up = (gate_up.float() + _sectioned(xa, b, (width, width))).chunk(2, 1)
    out.copy_(F.silu(gate) * up)


def swiglu_backward(
    gate_up: torch.Tensor,
    xa: torch.Tensor,
    b: torch.Tensor,
    act: torch.Tensor,
    t: torch.Tensor,
    a: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """gradient [M, 2 I] of gate and up, where act [M, I] holds the gradient of `swiglu`'s output but for LoRA's part
    t [M, R] @ a [R, I]; act becomes `swiglu`'s output."""
    width = act.shape[1]
    gate, up = (gate_up.float() + _sectioned(xa, b, (width, width))).chunk(2, 1)
    above = act.float() + t.float() @ a.float()
    sigmoid = torch.sigmoid(gate)
    gradient[:, :width] = (above * up * sigmoid * (1 + gate * (1 - sigmoid))).to(gradient.dtype)
    gradient[:, width:] = (above * gate * sigmoid).to(gradient.dtype)
    act.copy_(gate * sigmoid * up)


def _heads(qkv: torch.Tensor, sections: Sequence[int], dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v fp32 [heads, M, D], k and v repeated for the query heads that share them."""
    q, k, v = (part.float().view(len(part), -1, dim).transpose(0, 1) for part in _split(qkv, sections, 1))
    group = len(q) // len(k)
    return q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)


def _mask(starts: torch.Tensor) -> torch.Tensor:
    place = torch.arange(len(starts), device=starts.device)
    return (place[None] <= place[:, None]) & (place[None] >= starts[:, None])


def attention(
    qkv: torch.Tensor, starts: torch.Tensor, sections: Sequence[int], dim: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """out [M, q]: causal attention inside each packed row; starts int64 [M]: where the row of a position begins.
    lse fp32 [heads, M]: log of the sum of each softmax."""
    q, k, v = _heads(qkv, sections, dim)
    scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~_mask(starts), -torch.inf)
    lse.copy_(scores.logsumexp(-1))
    out.copy_((scores.softmax(-1) @ v).transpose(0, 1).reshape(out.shape))


def attention_backward(
    qkv: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    sections: Sequence[int],
    dim: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradient: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor],
    delta: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """result [M, q + 2 kv]: gradient of qkv, where out has the gradient `gradient` + t @ a, (t [M, R], a [R, q]) =
    `lora`; gradient becomes that sum. ends int64 [M]: behind the last position of the row; delta fp32 [heads, M] is
    scratch."""
    del ends  # a mask needs only where rows begin
    gradient.copy_(gradient.float() + lora[0].float() @ lora[1].float())
    q, k, v = _heads(qkv, sections, dim)
    above = gradient.float().view(len(gradient), -1, dim).transpose(0, 1)
    delta.copy_((above * out.float().view(len(out), -1, dim).transpose(0, 1)).sum(-1))
    scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~_mask(starts), -torch.inf)
    weights = (scores - lse[..., None]).exp()
    inner = weights * (above @ v.transpose(1, 2) - delta[..., None]) * dim**-0.5
    shared = sections[1] // dim, len(q) // (sections[1] // dim), len(gradient), dim
    d_k = (inner.transpose(1, 2) @ q).view(shared).sum(1)
    d_v = (weights.transpose(1, 2) @ above).view(shared).sum(1)
    result.copy_(torch.cat([part.transpose(0, 1).flatten(1) for part in (inner @ k, d_k, d_v)], 1))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, factor: torch.Tensor, losses: torch.Tensor) -> None:
    """losses fp32 [C] in nats, 0 where the target is `IGNORED`; logits [C, V] become the gradient of
    factor [1] * sum(losses), in place."""
    counted = targets != IGNORED
    value = logits.float()
    safe = targets.clamp(min=0)
    normaliser = value.logsumexp(-1)
    losses.copy_((normaliser - value.gather(1, safe[:, None])[:, 0]) * counted)
    gradient = (value - normaliser[:, None]).exp()
    gradient[torch.arange(len(safe), device=safe.device), safe] -= 1
    logits.copy_(gradient * (counted * factor)[:, None])


def adamw(
    masters: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    working: torch.Tensor,
    first_b: int,
    scalars: torch.Tensor,
    corrections: torch.Tensor,
    norm: torch.Tensor,
) -> None:
    """One AdamW update of flat fp32 [n] masters and moments; clears the gradient and rounds masters to `working`.

    From element `first_b` on are the B factors: their working copy carries LoRA's scaling, so their gradient is without
    it. scalars fp32: learning rate, weight decay, largest norm, scaling. corrections fp32 [2]: of the moments'
    bias, 1 - beta ** step; norm fp32 [1] of the gradient with scaling: where it is not finite nothing is updated.
    """
    rate, decay, largest, scaling = scalars.unbind()
    if torch.isfinite(norm):
        gradient[first_b:] *= scaling
        gradient *= (largest / (norm + 1e-6)).clamp(max=1.0)
        masters *= 1 - rate * decay
        exp_avg.lerp_(gradient, 1 - BETA1)
        exp_avg_sq.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = exp_avg_sq.sqrt() / corrections[1].sqrt() + EPS
        masters -= rate / corrections[0] * exp_avg / root
    gradient.zero_()
    publish(masters, working, first_b, scaling)


BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
"""torch.optim.AdamW's."""


def publish(masters: torch.Tensor, working: torch.Tensor, first_b: int, scaling: torch.Tensor) -> None:
    """Round the masters to the working copy, whose B factors carry LoRA's scaling."""
    working[:first_b].copy_(masters[:first_b])
    working[first_b:].copy_(masters[first_b:] * scaling)

"""A LoRA training step with a backward of our own, over the fused weights that SGLang serves from.

SGLang multiplies by one qkv and one gate-up matrix; so does this, and adds what LoRA contributes inside the operation
that reads the product anyway (rotation, SwiGLU, residual). Nothing here is autograd's: every tensor that outlives a
piece of work is an explicit buffer, so each piece may be captured, and run, on any stream. Frozen weights get no
gradient; LoRA's is accumulated in fp32.

The arithmetic between the matrix products is `core.finetune.kernels` on a GPU and `core.finetune.kernels_torch`
elsewhere. Hugging Face + peft is what both are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from core.errors import Invalid
from core.finetune import kernels_torch
from core.finetune.views import UnsupportedWeights
from core.memory.slot import Place, TorchMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from core.intake.packing import MicroBatch

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. eps: of its norms."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Rows of q, k and v in the fused weight."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    @property
    def gate_up(self) -> tuple[int, int]:
        return self.intermediate, self.intermediate

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        return self.hidden * (sum(self.qkv) + self.qkv[0] + 3 * self.intermediate)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors as SGLang holds them, [out, in]; bias and head norms are None where the model has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """A served model's weights; none is copied. inv_frequency fp32 [D / 2] and rope_scale make the rotary tables."""

    shape: Shape
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    inv_frequency: torch.Tensor
    rope_scale: float

    @classmethod
    def of(cls, served: torch.nn.Module, model: PreTrainedModel) -> FusedWeights:
        """The weights of `served` (SGLang's model); `model` is `core.finetune.views.shared_model` over it, for its
        config and rotary frequencies. Raises `UnsupportedWeights` for parts that the fused layer does not have."""
        config = model.config
        tensors = {
            name.replace(".base_layer.", "."): parameter.data
            for name, parameter in served.named_parameters(remove_duplicate=False)
        }
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            eps=config.rms_norm_eps,
        )
        rotary = model.model.rotary_emb
        unknown = [name for name in tensors if name.endswith(("o_proj.bias", "down_proj.bias", "gate_up_proj.bias"))]
        odd_heads = head_dim & (head_dim - 1) != 0  # a kernel's tile is a power of two wide
        if unknown or odd_heads or config.hidden_act != "silu" or rotary.rope_type not in _STATIC_ROPE:
            raise UnsupportedWeights(
                "unsupported_layer",
                f"the fused layer knows SwiGLU, no biases but q, k and v's, heads of a power of two, and rotary tables "
                f"of {_STATIC_ROPE}; the model has {config.hidden_act}, {unknown[:1] or 'no other bias'}, heads of "
                f"{head_dim} and {rotary.rope_type!r}; finetune without captured tasklets",
                "model",
            )
        layers = []
        for index in range(shape.layers):
            prefix = f"model.layers.{index}."
            layers.append(
                LayerWeights(
                    input_norm=tensors[prefix + "input_layernorm.weight"],
                    qkv=tensors[prefix + "self_attn.qkv_proj.weight"],
                    qkv_bias=tensors.get(prefix + "self_attn.qkv_proj.bias"),
                    q_norm=tensors.get(prefix + "self_attn.q_norm.weight"),
                    k_norm=tensors.get(prefix + "self_attn.k_norm.weight"),
                    o=tensors[prefix + "self_attn.o_proj.weight"],
                    post_norm=tensors[prefix + "post_attention_layernorm.weight"],
                    gate_up=tensors[prefix + "mlp.gate_up_proj.weight"],
                    down=tensors[prefix + "mlp.down_proj.weight"],
                )
            )
        embed = tensors["model.embed_tokens.weight"][: shape.vocabulary]
        tied = config.tie_word_embeddings or "lm_head.weight" not in tensors
        return cls(
            shape=shape,
            embed=embed,
            layers=tuple(layers),
            norm=tensors["model.norm.weight"],
            head=embed if tied else tensors["lm_head.weight"][: shape.vocabulary],
            inv_frequency=rotary.inv_freq.detach().float().to(embed.device),
            rope_scale=float(rotary.attention_scaling),
        )


# ---- LoRA ------------------------------------------------------------------------------------------------------------


class LayerLora(NamedTuple):
    """One layer's factors, or their gradients. A: [G * R, in], B: [out, R], G projections of a fused weight stacked."""

    a_qkv: torch.Tensor
    a_o: torch.Tensor
    a_gate_up: torch.Tensor
    a_down: torch.Tensor
    b_qkv: torch.Tensor
    b_o: torch.Tensor
    b_gate_up: torch.Tensor
    b_down: torch.Tensor


class LoraState:
    """LoRA of every linear layer at one rank, flat: masters, moments and gradient fp32 [n], working copy in the model's
    dtype [n]. All A factors come first, the B factors from element `first_b` on; in the working copy B carries LoRA's
    scaling. A module that is not trained, or a rank that is not used, is zero and stays zero: its gradient is."""

    def __init__(self, shape: Shape, rank: int, dtype: torch.dtype, device: torch.device, place: Place) -> None:
        self.shape, self.rank = shape, rank
        q, kv, _ = shape.qkv
        hidden, width = shape.hidden, shape.intermediate
        a = [(3 * rank, hidden), (rank, q), (2 * rank, hidden), (rank, width)]
        b = [(q + 2 * kv, rank), (hidden, rank), (2 * width, rank), (hidden, rank)]
        self._places: list[list[tuple[int, tuple[int, int]]]] = [[] for _ in range(shape.layers)]
        end = 0
        for factors in (a, b):
            if factors is b:
                self.first_b = end
            for places in self._places:
                for size in factors:
                    places.append((end, size))
                    end += -(-size[0] * size[1] // 64) * 64  # aligned for vector loads
        self.masters, self.exp_avg, self.exp_avg_sq = place.kept([(end,)] * 3)
        self.gradient = place.buffer((end,), torch.float32)
        self.working = place.buffer((end,), dtype)
        self.step = torch.zeros(1, dtype=torch.float32, device=device)
        self.factors = [self._layer(self.working, index) for index in range(shape.layers)]
        self.gradients = [self._layer(self.gradient, index) for index in range(shape.layers)]

    def _layer(self, flat: torch.Tensor, index: int) -> LayerLora:
        return LayerLora(
            *(flat[at : at + rows * columns].view(rows, columns) for at, (rows, columns) in self._places[index])
        )

    def named(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """peft's name of each factor and its view of `flat`, one of the state's flat tensors or a copy of one."""
        q, kv, _ = self.shape.qkv
        width, rank = self.shape.intermediate, self.rank
        for index in range(self.shape.layers):
            f = self._layer(flat, index)
            parts = {
                "self_attn.q_proj": (f.a_qkv[:rank], f.b_qkv[:q]),
                "self_attn.k_proj": (f.a_qkv[rank : 2 * rank], f.b_qkv[q : q + kv]),
                "self_attn.v_proj": (f.a_qkv[2 * rank :], f.b_qkv[q + kv :]),
                "self_attn.o_proj": (f.a_o, f.b_o),
                "mlp.gate_proj": (f.a_gate_up[:rank], f.b_gate_up[:width]),
                "mlp.up_proj": (f.a_gate_up[rank:], f.b_gate_up[width:]),
                "mlp.down_proj": (f.a_down, f.b_down),
            }
            for module, (a, b) in parts.items():
                name = f"base_model.model.model.layers.{index}.{module}.lora_"
                yield f"{name}A.default.weight", a
                yield f"{name}B.default.weight", b

    def load(self, flat: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Put a job's tensors, by peft's names, into `flat`; what is missing or of a smaller rank is zero there. Raises
        `Invalid` for a name or a rank that has no place."""
        flat.zero_()
        left = dict(values)
        for name, place in self.named(flat):
            value = left.pop(name, None)
            if value is None:
                continue
            corner = place[: value.shape[0], : value.shape[1]]
            if corner.shape != value.shape:
                raise Invalid(
                    "rank_too_large",
                    f"{name} is {tuple(value.shape)}, the captured slot has {tuple(place.shape)}; submit the job with "
                    f"rank {self.rank} or less",
                    "lora.rank",
                )
            corner.copy_(value)
        if left:
            raise Invalid(
                "unknown_module",
                f"{next(iter(left))} is no LoRA factor of this model; choose among its linear layers",
                "lora.target_modules",
            )


# ---- buffers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Saved:
    """What a layer's forward leaves for its backward; one a layer, or one for all when layers are recomputed."""

    rstd_in: torch.Tensor
    qkv: torch.Tensor
    raw: torch.Tensor | None
    attention: torch.Tensor
    lse: torch.Tensor
    middle: torch.Tensor
    rstd_middle: torch.Tensor
    gate_up: torch.Tensor
    xa_qkv: torch.Tensor
    xa_o: torch.Tensor
    xa_gate_up: torch.Tensor
    xa_down: torch.Tensor


class StepBuffers:
    """Every tensor that a micro-batch of `tokens` tokens (M) needs, allocated once. raw: with room for q and k as they
    are before head norms (Qwen3).

    inputs int64 [6, P]: ids, positions, starts, ends (of the packed row, per position), trained (positions whose next
    token counts, then M) and targets (then -100); P is M rounded up to whole head chunks. scalars fp32 [5]: learning
    rate, weight decay, largest norm, LoRA scaling, 1 / trained tokens of the step. report fp32 [2]: summed loss times
    that, and gradient norm, of the step that ended last.
    """

    def __init__(
        self, shape: Shape, tokens: int, rank: int, dtype: torch.dtype, place: Place, *, recompute: bool, raw: bool
    ) -> None:
        def new(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
            return place.buffer(size, of)

        fp32 = torch.float32
        q, kv, _ = shape.qkv
        hidden, width, heads = shape.hidden, shape.intermediate, shape.heads
        self.tokens = tokens
        # A head chunk is a forward and a backward of the largest matrix: as many tokens as make it as long as a
        # layer's backward, in whole tiles.
        chunks = max(1, 2 * shape.vocabulary * hidden // shape.layer_weights)
        self.head_chunk = min(tokens, -(-tokens // (64 * chunks)) * 64)
        self.head_chunks = -(-tokens // self.head_chunk)
        self.inputs = new(6, self.head_chunks * self.head_chunk, of=torch.int64)
        self.scalars = new(5, of=fp32)
        self.loss, self.norm, self.report = new(1, of=fp32), new(1, of=fp32), new(2, of=fp32)
        self.cosine, self.sine = new(tokens, shape.head_dim // 2, of=fp32), new(tokens, shape.head_dim // 2, of=fp32)
        # One row more than tokens: where a padded head chunk reads and writes.
        self.final = new(tokens + 1, hidden)
        self.gradient = new(tokens + 1, hidden)
        self.hidden = [new(tokens, hidden) for _ in range(shape.layers)] + [self.final[:tokens]]
        self.saved = [
            _Saved(
                rstd_in=new(tokens, of=fp32),
                qkv=new(tokens, q + 2 * kv),
                raw=new(tokens, q + kv) if raw else None,
                attention=new(tokens, q),
                lse=new(heads, tokens, of=fp32),
                middle=new(tokens, hidden),
                rstd_middle=new(tokens, of=fp32),
                gate_up=new(tokens, 2 * width),
                xa_qkv=new(tokens, 3 * rank),
                xa_o=new(tokens, rank),
                xa_gate_up=new(tokens, 2 * rank),
                xa_down=new(tokens, rank),
            )
            for _ in range(1 if recompute else shape.layers)
        ]
        # Scratch of one piece of work; the wide ones serve the forward and the backward.
        self.normed, self.product = new(tokens, hidden), new(tokens, hidden)
        self.qkv = new(tokens, q + 2 * kv)
        self.act = new(tokens, width)
        self.gate_up = new(tokens, 2 * width)
        self.attention, self.delta = new(tokens, q), new(heads, tokens, of=fp32)
        self.t_qkv, self.t_one, self.t_gate_up = new(tokens, 3 * rank), new(tokens, rank), new(tokens, 2 * rank)
        self.picked, self.picked_normed = new(self.head_chunk, hidden), new(self.head_chunk, hidden)
        self.picked_rstd, self.losses = new(self.head_chunk, of=fp32), new(self.head_chunk, of=fp32)
        self.logits = new(self.head_chunk, shape.vocabulary)


def pack_inputs(batch: MicroBatch, size: int) -> torch.Tensor:
    """`StepBuffers.inputs` of a packed micro-batch, on the CPU: int64 [6, size]."""
    length = len(batch.ids)
    place = np.arange(length)
    starts = place - batch.positions
    firsts = np.flatnonzero(batch.positions == 0)
    ends = np.append(firsts[1:], length)[np.searchsorted(firsts, place, side="right") - 1]
    trained = np.flatnonzero(batch.labels >= 0)
    packed = np.zeros((6, size), dtype=np.int64)
    packed[4], packed[5] = length, kernels_torch.IGNORED
    for row, values in enumerate((batch.ids, batch.positions, starts, ends, trained, batch.labels[trained])):
        packed[row, : len(values)] = values
    return torch.from_numpy(packed)


# ---- work ------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A piece of work of the program; `part` is a layer or a head chunk. recompute: a layer's forward once more,
    ahead of its backward, where activations are not kept."""

    name: Literal["forward", "head", "recompute", "backward", "optimizer"]
    part: int = 0


class FusedStep:
    """The arithmetic of one optimizer step over static buffers: `run` carries out any piece of work on the current
    stream, without reading anything back. place: where the buffers lie; torch's own memory where it is left out."""

    def __init__(
        self,
        weights: FusedWeights,
        *,
        rank: int,
        micro_batch_tokens: int,
        recompute: bool = False,
        place: Place | None = None,
    ) -> None:
        shape, embed = weights.shape, weights.embed
        self.weights, self.recompute = weights, recompute
        place = place if place is not None else TorchMemory(embed.device)
        self.lora = LoraState(shape, rank, embed.dtype, embed.device, place)
        raw = weights.layers[0].q_norm is not None
        self.buffers = StepBuffers(shape, micro_batch_tokens, rank, embed.dtype, place, recompute=recompute, raw=raw)
        self._ops = operations(embed.device)
        self._betas = torch.tensor([kernels_torch.BETA1, kernels_torch.BETA2], device=embed.device)

    def micro_batch(self, trained: int) -> list[Work]:
        """The program of a micro-batch with `trained` positions that count; chunks of the head without any are left
        out, but for the first, which also clears the gradient."""
        layers = range(self.weights.shape.layers)
        program = [Work("forward", index) for index in layers]
        program += [Work("head", index) for index in range(max(1, -(-trained // self.buffers.head_chunk)))]
        for index in reversed(layers):
            program += [Work("recompute", index)] if self.recompute else []
            program.append(Work("backward", index))
        return program

    def every_work(self) -> list[Work]:
        """All pieces of work that a program may name."""
        return [*self.micro_batch(self.buffers.tokens), Work("optimizer")]

    def run(self, work: Work) -> None:
        """Carry out one piece of work."""
        with torch.no_grad():
            if work.name == "forward":
                if work.part == 0:
                    self._embed()
                self._forward(work.part, output=True)
            elif work.name == "recompute":
                self._forward(work.part, output=False)
            elif work.name == "head":
                self._head(work.part)
            elif work.name == "backward":
                self._backward(work.part)
            else:
                self._optimizer()

    def publish(self) -> None:
        """Make the working copy anew, after masters or scaling were changed from outside."""
        lora = self.lora
        kernels_torch.publish(lora.masters, lora.working, lora.first_b, self.buffers.scalars[3])

    def _saved(self, layer: int) -> _Saved:
        return self.buffers.saved[0 if self.recompute else layer]

    def _norms(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        if layer.q_norm is None or layer.k_norm is None:
            return None
        return layer.q_norm, layer.k_norm, self.weights.shape.eps

    def _embed(self) -> None:
        w, b = self.weights, self.buffers
        ids, positions = b.inputs[0, : b.tokens], b.inputs[1, : b.tokens]
        torch.index_select(w.embed, 0, ids, out=b.hidden[0])
        angles = positions[:, None] * w.inv_frequency
        b.cosine.copy_(angles.cos() * w.rope_scale)
        b.sine.copy_(angles.sin() * w.rope_scale)

    def _forward(self, index: int, *, output: bool) -> None:
        shape, w, f = self.weights.shape, self.weights.layers[index], self.lora.factors[index]
        b, s, ops = self.buffers, self._saved(index), self._ops
        x = b.hidden[index]
        ops.rms_norm(x, w.input_norm, shape.eps, b.normed, s.rstd_in)
        ops.project(b.normed, f.a_qkv, s.xa_qkv)
        torch.mm(b.normed, w.qkv.t(), out=b.qkv)
        ops.rotate_qkv(b.qkv, w.qkv_bias, s.xa_qkv, f.b_qkv, self._norms(w), b.cosine, b.sine, shape.qkv, s.qkv, s.raw)
        ops.attention(s.qkv, b.inputs[2, : b.tokens], shape.qkv, shape.head_dim, s.attention, s.lse)
        ops.project(s.attention, f.a_o, s.xa_o)
        torch.mm(s.attention, w.o.t(), out=b.product)
        ops.add_residual(b.product, s.xa_o, f.b_o, x, s.middle)
        ops.rms_norm(s.middle, w.post_norm, shape.eps, b.normed, s.rstd_middle)
        ops.project(b.normed, f.a_gate_up, s.xa_gate_up)
        torch.mm(b.normed, w.gate_up.t(), out=s.gate_up)
        if not output:  # the backward makes the activation once more
            self._down_input(index)
            return
        ops.swiglu(s.gate_up, s.xa_gate_up, f.b_gate_up, b.act)
        ops.project(b.act, f.a_down, s.xa_down)
        torch.mm(b.act, w.down.t(), out=b.product)
        ops.add_residual(b.product, s.xa_down, f.b_down, s.middle, b.hidden[index + 1])

    def _down_input(self, index: int) -> None:
        f, b, s = self.lora.factors[index], self.buffers, self._saved(index)
        self._ops.swiglu(s.gate_up, s.xa_gate_up, f.b_gate_up, b.act)
        self._ops.project(b.act, f.a_down, s.xa_down)

    def _head(self, chunk: int) -> None:
        w, b, ops = self.weights, self.buffers, self._ops
        part = slice(chunk * b.head_chunk, (chunk + 1) * b.head_chunk)
        rows, targets = b.inputs[4, part], b.inputs[5, part]
        if chunk == 0:
            b.gradient.zero_()
        torch.index_select(b.final, 0, rows, out=b.picked)
        ops.rms_norm(b.picked, w.norm, w.shape.eps, b.picked_normed, b.picked_rstd)
        torch.mm(b.picked_normed, w.head.t(), out=b.logits)
        ops.cross_entropy(b.logits, targets, b.scalars[4:], b.losses)
        b.loss += b.losses.sum() * b.scalars[4]
        torch.mm(b.logits, w.head, out=b.picked_normed)
        ops.rms_norm_backward(b.picked_normed, None, b.picked, w.norm, b.picked_rstd, None, b.picked_normed, None)
        b.gradient.index_copy_(0, rows, b.picked_normed)

    def _backward(self, index: int) -> None:
        shape, w = self.weights.shape, self.weights.layers[index]
        f, g = self.lora.factors[index], self.lora.gradients[index]
        b, s, ops = self.buffers, self._saved(index), self._ops
        d = b.gradient[: b.tokens]
        one = (shape.hidden,)
        # down
        ops.project_sections(d, f.b_down, one, b.t_one)
        ops.accumulate_b(d, s.xa_down, one, g.b_down)
        torch.mm(d, w.down, out=b.act)
        ops.swiglu_backward(s.gate_up, s.xa_gate_up, f.b_gate_up, b.act, b.t_one, f.a_down, b.gate_up)
        ops.accumulate_a(b.t_one, b.act, g.a_down)
        # gate and up
        ops.project_sections(b.gate_up, f.b_gate_up, shape.gate_up, b.t_gate_up)
        ops.accumulate_b(b.gate_up, s.xa_gate_up, shape.gate_up, g.b_gate_up)
        torch.mm(b.gate_up, w.gate_up, out=b.product)
        ops.rms_norm_backward(
            b.product, (b.t_gate_up, f.a_gate_up), s.middle, w.post_norm, s.rstd_middle, d, d, b.normed
        )
        ops.accumulate_a(b.t_gate_up, b.normed, g.a_gate_up)
        # attention's output
        ops.project_sections(d, f.b_o, one, b.t_one)
        ops.accumulate_b(d, s.xa_o, one, g.b_o)
        ops.accumulate_a(b.t_one, s.attention, g.a_o)
        torch.mm(d, w.o, out=b.attention)
        ops.attention_backward(
            s.qkv,
            b.inputs[2, : b.tokens],
            b.inputs[3, : b.tokens],
            shape.qkv,
            shape.head_dim,
            s.attention,
            s.lse,
            b.attention,
            (b.t_one, f.a_o),
            b.delta,
            b.qkv,
        )
        # q, k and v
        ops.rotate_qkv_backward(b.qkv, s.raw, self._norms(w), b.cosine, b.sine, shape.qkv)
        ops.project_sections(b.qkv, f.b_qkv, shape.qkv, b.t_qkv)
        ops.accumulate_b(b.qkv, s.xa_qkv, shape.qkv, g.b_qkv)
        x = b.hidden[index]
        if index > 0:
            torch.mm(b.qkv, w.qkv, out=b.product)
            ops.rms_norm_backward(b.product, (b.t_qkv, f.a_qkv), x, w.input_norm, s.rstd_in, d, d, b.normed)
        else:  # nothing in front of the first layer is trained
            ops.rms_norm(x, w.input_norm, shape.eps, b.normed, s.rstd_in)
        ops.accumulate_a(b.t_qkv, b.normed, g.a_qkv)

    def _optimizer(self) -> None:
        b, lora = self.buffers, self.lora
        a_norm = torch.linalg.vector_norm(lora.gradient[: lora.first_b])
        b_norm = torch.linalg.vector_norm(lora.gradient[lora.first_b :]) * b.scalars[3]
        b.norm.copy_(torch.hypot(a_norm, b_norm)[None])
        lora.step += torch.isfinite(b.norm)
        corrections = 1 - self._betas**lora.step
        self._ops.adamw(
            lora.masters,
            lora.exp_avg,
            lora.exp_avg_sq,
            lora.gradient,
            lora.working,
            lora.first_b,
            b.scalars[:4],
            corrections,
            b.norm,
        )
        b.report[:1].copy_(b.loss)
        b.report[1:].copy_(b.norm)
        b.loss.zero_()


def operations(device: torch.device) -> ModuleType:
    """The module that does the small operations on `device`."""
    if device.type == "cuda":
        from core.finetune import kernels

        return kernels
    return kernels_torch

"""A base that is not served, its layers through a window: the losses and the adapter of a trainer that has it whole."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from core.errors import Invalid
from core.finetune import base_folder, streamed
from core.finetune.metered import MeteredTrainer
from core.finetune.streamed import StreamedBase
from core.finetune.trainer import Snapshot, Trainer
from core.link.messages import JobSpec, LoraSpec
from core.memory import _arena
from core.memory.arena import Arena
from core.memory.metered import MeteredActivations
from core.memory.share import JobShare
from core.memory.slot import TorchMemory
from core.memory.swap import Scratch, Swappable
from core.memory.window import WindowedActivations
from tests.finetune import small

PAGE, LAYERS, CPU = 4096, 5, torch.device("cpu")


def save(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def base(path: Path, slots: int, arena: Arena, dtype: torch.dtype = torch.float32) -> tuple[StreamedBase, Scratch]:
    scratch = Scratch(arena, "job 1")
    made = StreamedBase(
        base_folder.read(path, dtype), slots, scratch.take, device=CPU, mappings=lambda: scratch.mappings
    )
    made.load()
    return made, scratch


def train(spec: JobSpec, whole: StreamedBase, scratch: Scratch, arena: Arena) -> MeteredTrainer:
    def new_share(state: Sequence[torch.Tensor]) -> tuple[JobShare, WindowedActivations]:
        kept = Swappable(arena, "job 1", [(tuple(one.shape), one.dtype) for one in state], window=4 * PAGE)
        kept.put(state)
        frozen = [parameter for parameter in whole.model.parameters() if not parameter.requires_grad]
        growing = MeteredActivations(arena, "job 1", 2000, shared=[*frozen, *kept.tensors])
        activations = WindowedActivations(scratch, growing)
        return JobShare(kept, activations), activations

    return MeteredTrainer(
        whole.model, spec, small.rows(), base_name=whole.name, streamed=whole, new_share=new_share
    )  # fmt: skip


def finish(trainer: Trainer, taken_every: int = 0) -> Snapshot:
    """Run to the end; what is wanted is granted, and every so often everything droppable is taken, every other time the
    state too."""
    ran = 0
    while not trainer.done:
        if isinstance(trainer, MeteredTrainer) and trainer.share.wanted:
            trainer.share.grant(trainer.share.wanted)
            trainer.share.settle()
        trainer.run_next()
        ran += 1
        if isinstance(trainer, MeteredTrainer) and taken_every and ran % taken_every == 0:
            over = trainer.start_again()
            gc.collect()
            trainer.share.give_up_activations(over)
            if ran // taken_every % 2:
                trainer.share.swap_out(over)
            trainer.share.settle()
            assert trainer.share.held == (0 if ran // taken_every % 2 else trainer.share.state.pages)
    return trainer.snapshot()


@pytest.mark.parametrize("taken_every", [0, 43])
@pytest.mark.parametrize("slots", [1, 2, LAYERS])
def test_losses_and_adapter_are_those_of_a_trainer_that_has_the_base_whole(
    slots: int, taken_every: int, tmp_path: Path
) -> None:
    model = small.model("llama", layers=LAYERS)
    path = save(model, tmp_path / "base")
    spec = small.spec(
        tmp_path, max_steps=4, accumulation=2, lora=LoraSpec(rank=4, alpha=8.0, dropout=0.1), evaluation_fraction=0.2,
        evaluate_every=3,
    )  # fmt: skip
    plain = Trainer(model, spec, small.rows(), base_name="base")
    alone = finish(plain)
    arena = _arena.memfd_arena(PAGE, 4000)
    trainer = train(spec, *base(path, slots, arena), arena)
    told = finish(trainer, taken_every)
    assert trainer.take_metrics() == plain.take_metrics()
    assert told.optimizer.keys() == alone.optimizer.keys()
    assert all(torch.equal(told.optimizer[name], value) for name, value in alone.optimizer.items())
    for name, snapshot in (("streamed", told), ("alone", alone)):
        snapshot.save_adapter(tmp_path / name)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("streamed", "alone")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    assert '"base_model_name_or_path": "base"' in (tmp_path / "streamed/adapter_config.json").read_text()
    trainer.close()
    trainer.share.settle()
    assert arena.statistics().used == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_is_read_and_trained_as_hugging_face_has_it(
    family: str, tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = small.model(family, tied=tied, dtype=dtype, layers=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    path = save(model, tmp_path / "base")
    spec = small.spec(tmp_path, max_steps=2)
    plain = Trainer(model, spec, small.rows(), base_name="base")
    finish(plain)
    arena = _arena.memfd_arena(PAGE, 4000)
    trainer = train(spec, *base(path, 2, arena, dtype), arena)
    finish(trainer)
    assert trainer.take_metrics() == plain.take_metrics()
    trainer.close()


def test_a_folder_in_shards_of_another_dtype_is_converted(tmp_path: Path) -> None:
    model = small.model("qwen2", dtype=torch.bfloat16, layers=3)
    model.save_pretrained(tmp_path / "base", max_shard_size="10KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    folder = base_folder.read(tmp_path / "base", torch.float32)
    host = base_folder.load(folder, CPU)
    whole = StreamedBase(folder, 3, TorchMemory(CPU).buffer, device=CPU)
    whole.window.source = host
    whole.window.follow(range(3))
    whole.window.feed()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in whole.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name].float()), name
    assert folder.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("ran", [0, 3, 17])
def test_a_job_that_ends_in_the_middle_leaves_the_arena_as_it_was(ran: int, tmp_path: Path) -> None:
    arena = _arena.memfd_arena(PAGE, 4000)
    kv = arena.claim("kv cache", 100)
    before = arena.statistics().used
    path = save(small.model(layers=LAYERS), tmp_path / "base")
    whole, scratch = base(path, 2, arena)
    trainer = train(small.spec(tmp_path), whole, scratch, arena)
    trainer.share.grant(trainer.share.wanted)
    trainer.share.settle()
    held = {one.name: one.pages for one in arena.statistics().owners}
    assert held["job 1"] == trainer.share.state.pages + scratch.pages > 0
    for _ in range(ran):
        if trainer.share.wanted:
            trainer.share.grant(trainer.share.wanted)
            trainer.share.settle()
        trainer.run_next()
    trainer.close()
    trainer.share.settle()
    assert arena.statistics().used == before and whole.window.source is None
    del kv


# ---- folders that are no base ----------------------------------------------------------------------------------------


def changed(path: Path, change: str) -> Path:
    model = small.model("qwen2", layers=3)
    state = model.state_dict()
    if change == "missing":
        del state["model.layers.1.mlp.up_proj.weight"]
    elif change == "shape":
        state["model.layers.2.self_attn.o_proj.weight"] = torch.zeros(32, 16)
    elif change == "unknown":
        state["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    elif change == "quantised":
        state["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
    del state["lm_head.weight"]
    model.save_pretrained(path, state_dict=state)
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", r"model\.layers\.1\.mlp\.up_proj\.weight is missing; copy the folder again"),
        ("shape", r"model\.layers\.2\.self_attn\.o_proj\.weight is \[32, 16\] and has to be \[32, 32\]"),
        ("unknown", r"model\.layers\.0\.self_attn\.o_proj\.bias is not known"),
        ("quantised", r"model\.norm\.weight in .*model\.safetensors is I8"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(change: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=words):
        base_folder.read(changed(tmp_path / "base", change), torch.float32)


def test_another_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = save(small.model(), tmp_path / "base")
    config = path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "OPTForCausalLM"))
    with pytest.raises(Invalid, match="is a OPTForCausalLM; finetuning knows LlamaForCausalLM, Mistral"):
        base_folder.read(path, torch.float32)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = save(small.model(), tmp_path / "base")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Invalid, match=r"has no safetensors weights that can be read: .*; copy the folder again"):
        base_folder.read(path, torch.float32)


def test_a_window_that_a_job_cannot_have_is_refused_with_one_that_it_can(tmp_path: Path) -> None:
    folder = base_folder.read(save(small.model(layers=LAYERS), tmp_path / "base"), torch.float32)
    streamed.check_room(folder, 4, folder.window_bytes(4))
    with pytest.raises(Invalid, match="set HARLI_FINETUNE__WINDOW_LAYERS to 2 or less"):
        streamed.check_room(folder, 4, folder.window_bytes(3) - 1)
    with pytest.raises(Invalid, match="not even one layer would fit"):
        streamed.check_room(folder, 4, 1000)

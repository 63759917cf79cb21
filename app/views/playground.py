"""Playground: chat with the base model and an adapter, side by side."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app.ui.conversation import Conversation, Turn
from app.ui.data import all_adapters, client, engine
from app.ui.page import Fault, heading, reading, show_fault, teach
from app.ui.stale import end_page
from app.ui.text import ms, number, plain

_BASE = "base model"
_POLL_S = 0.2


def conversations() -> dict[tuple[str, str], Conversation]:
    """All conversations of the session, by side and model; they outlive page switches."""
    kept: dict[tuple[str, str], Conversation] = st.session_state.setdefault("_chats", {})
    return kept


def conversation(side: str, model: str) -> Conversation:
    """The side's conversation with the model."""
    return conversations().setdefault((side, model), Conversation())


def streaming() -> bool:
    return any(each.busy for each in conversations().values())


def summary(turn: Turn) -> str:
    """How the answer went: tokens, speed, time to the first one."""
    if turn.stopped:
        return "stopped"
    reply = turn.reply
    if reply is None:
        return ""
    parts = [f"{number(reply.completion_tokens)} tokens", f"{number(reply.prompt_tokens)} in the prompt"]
    if reply.first_ms is not None:
        parts.append(f"first after {ms(reply.first_ms)} ms")
        if reply.completion_tokens and reply.completion_tokens > 1:
            parts.append(f"then {ms((reply.total_ms - reply.first_ms) / (reply.completion_tokens - 1))} ms per token")
    if reply.finish_reason == "length":
        parts.append("cut at the token limit")
    return " · ".join(parts)


def show_turn(turn: Turn) -> None:
    with st.chat_message("user", avatar=":material/person:"):
        st.markdown(plain(turn.question))
    with st.chat_message("assistant", avatar=":material/smart_toy:"):
        if turn.error is not None:
            show_fault(Fault("The answer", turn.error))
            return
        st.markdown(turn.answer if turn.done.is_set() else turn.answer + " ▌")
        st.caption(summary(turn) or " ")


def show_side(side: str, model: str) -> None:
    with st.container(border=True, key=f"side_{side}"):
        st.markdown(f"**{plain(model)}**")
        turns = conversation(side, model).turns
        if not turns:
            st.caption("Ask something below.")
        for turn in turns:
            show_turn(turn)


def note_question(asked: list[str]) -> None:
    """Keep what was asked until it is sent: the run that it came with can end before that."""
    asked.append(st.session_state["question"])


def ask(asked: list[str], models: dict[str, str]) -> None:
    """Send the question to all `models`. Nothing of Streamlit is touched once the first of them has it: whoever asks,
    asks all of them, and each with the viewer's own token, which the threads that stream do not know."""
    system, chosen = st.session_state["_sampling"]
    talks = [(conversation(side, model), None if model == _BASE else model) for side, model in models.items()]
    api = client()
    st.session_state["_chat_streams"] = True
    question = asked[0]
    asked.clear()
    for talk, model in talks:
        talk.ask(
            question,
            model,
            system,
            chosen,
            lambda messages, name, given: api.chat(messages, name, stream=True, **given),
        )


def draw(models: dict[str, str]) -> None:
    """Both conversations; drawn anew while one streams, and once more when it has ended."""
    for column, (side, model) in zip(st.columns(len(models)), models.items(), strict=True):
        with column:
            show_side(side, model)
    if st.session_state.get("_chat_streams") and not streaming():
        st.session_state["_chat_streams"] = False
        st.rerun()


def sampling() -> tuple[str, dict[str, Any]]:
    """System prompt and sampling settings, kept for the session."""
    with st.popover("Sampling", icon=":material/tune:"):
        system = st.text_area("System prompt", key="system", persist_state="session", height=90)
        temperature = st.slider("Temperature", 0.0, 2.0, 0.0, 0.05, key="temperature", persist_state="session")
        top_p = st.slider("Top p", 0.05, 1.0, 1.0, 0.05, key="top_p", persist_state="session")
        tokens = st.number_input("Longest answer, tokens", 1, 4096, 128, key="max_tokens", persist_state="session")
        penalty = st.slider("Repetition penalty", 1.0, 2.0, 1.0, 0.05, key="penalty", persist_state="session")
        seed = st.number_input("Seed", 0, None, None, key="sampling_seed", persist_state="session", placeholder="none")
    chosen: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": int(tokens)}
    if penalty != 1.0:
        chosen["repetition_penalty"] = penalty
    if seed is not None:
        chosen["seed"] = int(seed)
    return system, chosen


def clear() -> None:
    stop()
    conversations().clear()


def stop() -> None:
    for each in conversations().values():
        each.halt()


def choose(deployed: list[str]) -> dict[str, str]:
    """Side → model; one side when the comparison is off."""
    options = [_BASE, *deployed]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        both = st.toggle("Side by side", value=True, key="both", bind="query-params")
        left = st.selectbox("Left" if both else "Model", options, key="left", bind="query-params", width=220)
        models = {"left": left}
        if both:
            newest = len(options) - 1
            models["right"] = st.selectbox("Right", options, newest, key="right", bind="query-params", width=220)
        st.session_state["_sampling"] = sampling()
        if streaming():
            st.button("Stop", icon=":material/stop_circle:", key="stop_chat", on_click=stop, type="primary")
        elif any(each.turns for each in conversations().values()):
            st.button("Clear", icon=":material/delete_sweep:", key="clear_chat", on_click=clear)
    return models


heading("Playground", "The base model and an adapter, asked the same. Jobs train on meanwhile, within the target.")
with reading("the engine and its adapters"):
    served, adapters = engine(), all_adapters()
if served.state != "ready":
    teach(
        "The engine does not serve now",
        f"It is {served.state}; the Overview says what is known. Chatting works as soon as it is ready.",
        "harli up\nharli doctor",
        "curl {api}/api/engine",
    )
    end_page()
names = [adapter.name for adapter in adapters if adapter.deployed_version is not None]
names += [a.address for adapter in adapters for a in adapter.aliases if a.deployed_version is not None]
chosen = choose(names)
if not names:
    st.info(
        "No adapter is deployed, so that both sides are the base model. Deploy one on the Adapters page, or let a job "
        "make one.",
        icon=":material/lightbulb:",
    )
asked: list[str] = st.session_state.setdefault("_asked", [])
st.chat_input(
    "Ask both" if len(chosen) > 1 else "Ask", key="question", disabled=streaming(), on_submit=note_question,
    args=(asked,),
)  # fmt: skip
if asked:
    ask(asked, chosen)
    st.rerun()
if st.session_state.get("_chat_streams"):
    st.fragment(draw, run_every=_POLL_S)(chosen)
else:
    draw(chosen)

"""The sidebar's live status: the engine, the jobs, where the API is."""

from __future__ import annotations

import streamlit as st

from app.ui.address import keep_to_address
from app.ui.data import live, settings
from app.ui.text import plain
from core.errors import HarliError, Unauthorized

_ENGINE = {
    "ready": ":green-badge[:material/check_circle: engine ready]",
    "lost": ":red-badge[:material/error: engine lost]",
    "absent": ":orange-badge[:material/hourglass_top: engine not there yet]",
}


@st.fragment(run_every="2s")
def status() -> None:
    """A few lines under the navigation; says so when the API cannot be reached."""
    keep_to_address()
    try:
        now = live()
    except Unauthorized:
        st.markdown(":red-badge[:material/lock: not signed in]")
        return
    except HarliError:
        st.markdown(":red-badge[:material/cloud_off: API unreachable]")
        st.caption(plain(settings().api_url))
        return
    st.markdown(_ENGINE[now.engine.state])
    served = " · ".join(part for part in (now.engine.model, now.engine.device_name or now.engine.device) if part)
    running, queued = now.jobs.get("running", 0), now.jobs.get("queued", 0)
    st.caption(f"{plain(served)}  \njobs: {running} running · {queued} queued" if served else f"jobs: {queued} queued")

"""The console's entry point: ``streamlit run app/main.py`` (settings: HARLI_* and harli.toml)."""

from __future__ import annotations

import streamlit as st

from app.ui.address import drawn_for_this_address
from app.ui.identity import require_sign_in, show_identity
from app.ui.keep import keep_fields
from app.ui.page import forget_faults
from app.ui.press import keep_presses
from app.ui.sidebar import status
from app.ui.stale import drop_requests_of_pages_left
from app.ui.theme import ICON, apply_page_style, show_brand

drop_requests_of_pages_left()
keep_presses()
st.set_page_config(page_title="Harli", page_icon=ICON, layout="wide")
apply_page_style()
show_brand()
require_sign_in()

page = st.navigation(
    [
        st.Page("views/overview.py", title="Overview", icon=":material/monitoring:", default=True),
        st.Page("views/jobs.py", title="Jobs", icon=":material/model_training:"),
        st.Page("views/datasets.py", title="Data sets", icon=":material/database:"),
        st.Page("views/adapters.py", title="Adapters", icon=":material/extension:"),
        st.Page("views/playground.py", title="Playground", icon=":material/forum:"),
        st.Page("views/targets.py", title="Targets", icon=":material/target:"),
        st.Page("views/alerts.py", title="Alerts", icon=":material/notifications:"),
        st.Page("views/memory.py", title="Memory", icon=":material/grid_view:"),
        st.Page("views/engine.py", title="Engine", icon=":material/memory:"),
        st.Page("views/tenants.py", title="Tenants", icon=":material/group:"),
        st.Page("views/audit.py", title="Audit", icon=":material/history:"),
    ]
)
if st.session_state.get("_page") != page.title:
    st.session_state["_page"] = page.title
    forget_faults()
keep_fields()
drawn_for_this_address()
with st.sidebar:
    status()
    show_identity()
page.run()

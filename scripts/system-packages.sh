#!/usr/bin/env bash
# Installs what the tests need from the system (Chromium, PostgreSQL's server, curl) when it is missing, by apt.
# Where that is not possible it says so and ends well: the test run then names the tests that it left out.
set -euo pipefail

has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
has_postgres() { command -v postgres || compgen -G '/usr/lib/postgresql/*/bin/postgres'; }

wanted=()
if ! has_browser >/dev/null; then
    # Ubuntu has Chromium under another name.
    if grep -qs '^ID=ubuntu' /etc/os-release; then wanted+=(chromium-browser); else wanted+=(chromium); fi
fi
has_postgres >/dev/null || wanted+=(postgresql)
command -v curl >/dev/null || wanted+=(curl)
[ ${#wanted[@]} -gt 0 ] || exit 0

give_up() {
    echo "system packages: $1; missing: ${wanted[*]}. Tests that need them will be reported as not run." >&2
    exit 0
}
command -v apt-get >/dev/null || give_up 'there is no apt-get here'
root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || give_up 'installing needs root, and there is no sudo'
    root=(sudo)
fi
echo "system packages: installing ${wanted[*]}"
export DEBIAN_FRONTEND=noninteractive
{
    "${root[@]}" apt-get update -qq &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}"
} >/dev/null || give_up 'apt-get failed (its message is above)'

#!/usr/bin/env bash
# Gets what the tests need from the system (Chromium, PostgreSQL's server, curl, nginx) when it is missing, by apt.
# Where that is not possible it says so and ends well: the test run then names the tests that it left out.
set -euo pipefail
cd "$(dirname "$0")/.."

unpacked=.cache/nginx
has_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
has_postgres() { command -v postgres || compgen -G '/usr/lib/postgresql/*/bin/postgres'; }
has_nginx() { command -v nginx || command -v /usr/sbin/nginx || command -v "$unpacked/usr/sbin/nginx"; }

wanted=()
if ! has_browser >/dev/null; then
    # Ubuntu has Chromium under another name.
    if grep -qs '^ID=ubuntu' /etc/os-release; then wanted+=(chromium-browser); else wanted+=(chromium); fi
fi
has_postgres >/dev/null || wanted+=(postgresql)
command -v curl >/dev/null || wanted+=(curl)
has_nginx >/dev/null && nginx=() || nginx=(nginx)
missing=("${wanted[@]}" "${nginx[@]}")
[ ${#missing[@]} -gt 0 ] || exit 0

give_up() {
    echo "system packages: $1; missing: ${missing[*]}. Tests that need them will be reported as not run." >&2
    exit 0
}
command -v apt-get >/dev/null || give_up 'there is no apt-get here'
root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || give_up 'installing needs root, and there is no sudo'
    root=(sudo)
fi
echo "system packages: getting ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq >/dev/null || give_up 'apt-get update failed (its message is above)'
if [ ${#wanted[@]} -gt 0 ]; then
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" \
        >/dev/null || give_up 'apt-get failed (its message is above)'
fi
# nginx is unpacked, not installed: an installed one would begin to serve on port 80. Older releases have the program in
# a package of its own.
for package in ${nginx[@]+nginx nginx-core}; do
    has_nginx >/dev/null && break
    mkdir -p "$unpacked"
    (cd "$unpacked" && apt-get download -qq "$package" >/dev/null 2>&1 && dpkg -x "$package"_*.deb . && rm -- *.deb) || true
done
[ ${#nginx[@]} -eq 0 ] || has_nginx >/dev/null || give_up 'nginx could not be unpacked'

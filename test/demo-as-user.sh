#!/usr/bin/env bash
# 'make demo ONCE=1' as an ordinary user, in a fresh clone that the user owns.
# Root calls it. The clone holds what is committed.
set -euo pipefail
cd "$(dirname "$0")/.."
user=${DEMO_USER:-nobody}
[ "$(id -u)" = 0 ] || { echo "test/demo-as-user.sh: needs root, to become another user" >&2; exit 2; }
uid=$(id -u "$user") gid=$(id -g "$user")
[ "$uid" != 0 ] || { echo "test/demo-as-user.sh: $user is root" >&2; exit 2; }
dir=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-user.XXXXXX")
cleanup() {
  trap - EXIT INT TERM
  rm -rf --one-file-system "$dir"
}
trap cleanup EXIT
trap 'exit 1' INT TERM
chmod 755 "$dir"
git -c advice.detachedHead=false clone -q --no-local "$PWD" "$dir/dunlin"
mkdir "$dir/home" "$dir/cache" "$dir/tmp" "$dir/mod"
chown -R "$uid:$gid" "$dir"/{dunlin,home,cache,tmp}
# Our build cache saves minutes: hard links, which the user can read and not
# write, in folders of the user's own. Elsewhere the user builds it all.
if cp -rl "$(go env GOCACHE)/." "$dir/cache" 2>/dev/null; then
  find "$dir/cache" -type d -exec chown "$uid:$gid" {} +
fi

# The modules come from our own cache, read-only: a mount that only these
# processes see, so that it needs no cleaning up.
as_user() {
  unshare --mount bash -euc '
    mount --bind "$1" "$2" && mount -o remount,bind,ro "$2"
    shift 2
    exec setpriv --no-new-privs --reuid "$1" --regid "$2" --clear-groups --bounding-set=-all --inh-caps=-all "${@:3}"
  ' - "$(go env GOMODCACHE)" "$dir/mod" "$uid" "$gid" \
    env -i PATH="$PATH" HOME="$dir/home" TMPDIR="$dir/tmp" GOCACHE="$dir/cache" GOMODCACHE="$dir/mod" \
    GOPROXY=off GOFLAGS="-buildvcs=false -modcacherw=false" GOTOOLCHAIN=local "$@"
}

# What the user runs already is not the demo's, and what has ended and waits for
# init to collect it does not count.
running() { ps -u "$uid" -o pid=,stat=,args= | awk '$2 !~ /^Z/ && /dunlin/' || true; }
before=$(running)
as_user make -C "$dir/dunlin" demo ONCE=1 2>&1 | tee "$dir/output"
grep -q '^Hello from hello-' "$dir/output" || { echo "test/demo-as-user.sh: no answer from the app" >&2; exit 1; }
left=$(find "$dir/tmp" "$dir/home" -mindepth 1 -not -path "$dir/home/.config*" | head)
[ -z "$left" ] || { echo "test/demo-as-user.sh: left behind: $left" >&2; exit 1; }
left=$(running | grep -vxF -e "$before" || true)
[ -z "$left" ] || { echo "test/demo-as-user.sh: processes left behind: $left" >&2; exit 1; }
echo "make demo works as $user (uid $uid)"

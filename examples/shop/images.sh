#!/usr/bin/env bash
# Makes the images of the shop from Debian's packages nginx, redis-server and
# redis-tools (downloaded and unpacked, not installed), for this machine's
# architecture: ../../bin/examples/shop-web.tar and shop-redis.tar, of the kind
# that docker save makes. Needs Debian or Ubuntu, as root or not.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
out=$root/bin/examples
mkdir -p "$out"
if [ "$out/shop-redis.tar" -nt images.sh ] && [ "$out/shop-redis.tar" -nt "$root/tools/rootfs/rootfs.sh" ]; then exit 0; fi
command -v apt-get >/dev/null || { echo "shop: Debian's apt-get is needed to make the images" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-shop.XXXXXX")
trap 'rm -rf "$work"' EXIT
# shellcheck source=../../tools/rootfs/rootfs.sh
. "$root/tools/rootfs/rootfs.sh"

echo "making the images of the shop"
unpack nginx nginx-common redis-server redis-tools

folders "$work/web"
program "$work/web" /usr/sbin/nginx
mkdir -p "$work/web/etc/nginx" "$work/web/var/lib/nginx" "$work/web/var/log/nginx"
install -m 644 "$debs/root/etc/nginx/mime.types" "$work/web/etc/nginx/mime.types"
image shop-web.tar "$work/web" "{$path,\"User\":\"33:33\",\"Entrypoint\":[\"nginx\",\"-e\",\"stderr\",\"-g\",\"daemon off;\"],\"ExposedPorts\":{\"8080/tcp\":{}}}" shop-web:1

folders "$work/redis"
program "$work/redis" /usr/bin/redis-check-rdb # the same program as redis-server
program "$work/redis" /usr/bin/redis-cli
ln -s redis-check-rdb "$work/redis/usr/bin/redis-server"
echo 'redis:x:999:999:redis:/data:/bin/false' >>"$work/redis/etc/passwd"
echo 'redis:x:999:' >>"$work/redis/etc/group"
install -d -m 755 "$work/redis/data"
image shop-redis.tar "$work/redis" "{$path,\"User\":\"999:999\",\"WorkingDir\":\"/data\",\"Entrypoint\":[\"redis-server\"],\"ExposedPorts\":{\"6379/tcp\":{}}}" shop-redis:1

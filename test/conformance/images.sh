#!/usr/bin/env bash
# Makes the images that the suite's pods name, without a registry: the same
# names and tags, contents of our own. agnhost is built from the pinned
# module; busybox, nginx and the tools that agnhost's image carries are
# Debian's, each with the libraries that it loads. Writes one archive of the
# kind docker save makes per image to bin/conformance/images. What is newer
# than its sources is kept.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
out=$root/bin/conformance/images
mkdir -p "$out"
stamp=$out/made
if [ -e "$stamp" ] && [ "$stamp" -nt images.sh ] && [ "$stamp" -nt "$root/tools/rootfs/rootfs.sh" ] && [ "$stamp" -nt go.mod ] && [ "$stamp" -nt pause/main.go ]; then exit 0; fi
command -v busybox >/dev/null || { echo "conformance: busybox is needed (apt-get install busybox-static)" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-img.XXXXXX")
trap 'rm -rf "$work"' EXIT
module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)
[ -n "$module" ] || { go mod download k8s.io/kubernetes; module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes); }

# shellcheck source=../../tools/rootfs/rootfs.sh
. "$root/tools/rootfs/rootfs.sh"
# tag ID is upstream's repository and tag of an image, from its own list.
tag() {
  sed -n "s|.*configs\[$1\] = Config{list\.\([A-Za-z0-9]*\), \"\([^\"]*\)\", \"\([^\"]*\)\"}.*|\1/\2:\3|p" "$module/test/utils/image/manifest.go" |
    sed -e 's|^PromoterE2eRegistry/|registry.k8s.io/e2e-test-images/|' -e 's|^GcRegistry/|registry.k8s.io/|'
}

echo "making the images of the suite's pods (some minutes)"
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.Version=$(cat "$module/test/images/agnhost/VERSION")" -o "$work/agnhost" k8s.io/kubernetes/test/images/agnhost
unpack curl bind9-dnsutils netcat-openbsd iproute2 socat bash nginx libc-bin
mkdir -p "$work/pause"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$work/pause/pause" ./pause
image pause.tar "$work/pause" '{"Entrypoint":["/pause"],"User":"65535:65535"}' "$(tag Pause)"

base "$work/busybox"
shell "$work/busybox"
image busybox.tar "$work/busybox" "{$path,\"Cmd\":[\"sh\"]}" "$(tag BusyBox)"

# It says as whom it runs, and has the set-user-id bit.
base "$work/nnp"
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$work/nnp/nnp" k8s.io/kubernetes/test/images/nonewprivs
install -D -m 4755 "$work/nnp/nnp" "$work/nnp/usr/local/bin/nnp"
image Nonewprivs.tar "$work/nnp" "{$path,\"Cmd\":[\"nnp\"]}" "$(tag Nonewprivs)"

base "$work/agn"
rm -f "$work/agn"/bin/{curl,dig,nslookup,nc,netcat,ss,ip}
for p in /usr/bin/dig /usr/bin/nslookup /usr/bin/curl /bin/nc.openbsd /bin/ss /bin/ip /usr/bin/socat /usr/bin/getent; do
  program "$work/agn" "$p"
done
ln -s nc.openbsd "$work/agn/bin/nc"
shell "$work/agn"
printf '%s\n' 'user-defined-in-image:x:1000:1000::/home:/bin/sh' >>"$work/agn/etc/passwd"
printf '%s\n' 'user-defined-in-image:x:1000:' 'group-defined-in-image:x:50000:user-defined-in-image' >>"$work/agn/etc/group"
mkdir "$work/agn/uploads"
cp "$work/agnhost" "$work/agn/agnhost"
ln -s agnhost "$work/agn/agnhost-2"
cp "$module"/test/images/agnhost/porter/localhost.{crt,key} "$work/agn/"
chmod -R u+w "$work/agn"
# One is musl's and one glibc's upstream, to see both look up names.
image GlibcDnsTesting.tar "$work/agn" "{$path,\"Cmd\":[\"sh\"]}" "$(tag GlibcDnsTesting)"
image agnhost.tar "$work/agn" "{$path,\"Entrypoint\":[\"/agnhost\"],\"Cmd\":[\"pause\"],\"WorkingDir\":\"/\"}" "$(tag Agnhost)" "$(tag AgnhostPrev)"

base "$work/web"
program "$work/web" /usr/sbin/nginx
mkdir -p "$work/web"/{etc/nginx,usr/share/nginx/html,var/lib/nginx,var/log/nginx}
echo 'Welcome to nginx!' >"$work/web/usr/share/nginx/html/index.html"
cat >"$work/web/etc/nginx/nginx.conf" <<'C'
worker_processes 1;
pid /run/nginx.pid;
error_log /dev/stderr warn;
events { worker_connections 64; }
http {
  access_log /dev/stdout;
  default_type text/html;
  server { listen 80; root /usr/share/nginx/html; }
}
C
for name in Nginx NginxNew; do
  image "$name.tar" "$work/web" "{$path,\"Cmd\":[\"nginx\",\"-g\",\"daemon off;\"],\"ExposedPorts\":{\"80/tcp\":{}},\"Labels\":{\"is\":\"$name\"}}" "$(tag $name)"
done
# The pictures of the update demo are known by what their page says.
for name in Nautilus Kitten; do
  echo "{\"image\": \"${name,}.jpg\"}" >"$work/web/usr/share/nginx/html/data.json"
  image "$name.tar" "$work/web" "{$path,\"Cmd\":[\"nginx\",\"-g\",\"daemon off;\"],\"ExposedPorts\":{\"80/tcp\":{}}}" "$(tag $name)"
done
image NonRoot.tar "$work/busybox" "{$path,\"Cmd\":[\"sh\"],\"User\":\"1234\"}" "$(tag NonRoot)"
touch "$stamp"

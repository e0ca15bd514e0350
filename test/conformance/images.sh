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
if [ -e "$stamp" ] && [ "$stamp" -nt images.sh ] && [ "$stamp" -nt go.mod ] && [ "$stamp" -nt pause/main.go ]; then exit 0; fi
command -v busybox >/dev/null || { echo "conformance: busybox is needed (apt-get install busybox-static)" >&2; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/dunlin-img.XXXXXX")
trap 'rm -rf "$work"' EXIT
module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes)
[ -n "$module" ] || { go mod download k8s.io/kubernetes; module=$(go list -m -f '{{.Dir}}' k8s.io/kubernetes); }

# Debian's packages and what they need and this machine lacks are unpacked into
# a folder: their services must not start here.
debs=$work/debs
unpack() {
  local list
  list=$(apt-get install -s --no-install-recommends "$@" 2>/dev/null | awk '/^Inst/ {print $2}')
  mkdir -p "$debs/root"
  # shellcheck disable=SC2086
  (cd "$debs" && apt-get download -qq -o APT::Sandbox::User=root $(printf '%s\n' "$@" $list | sort -u) && for p in *.deb; do dpkg -x "$p" root; done)
}
# program ROOT PATH copies an unpacked program and the libraries that it loads.
triplet=$(uname -m)-linux-gnu
program() {
  local r=$1 path=$2 lib
  install -D -m 755 "$debs/root$path" "$r$path"
  LD_LIBRARY_PATH=$debs/root/usr/lib/$triplet:$debs/root/lib/$triplet ldd "$debs/root$path" | grep -o '/[^ ]*' | while IFS= read -r lib; do
    case $lib in
      /lib64/* | /lib/ld-*) install -D -m 755 "$lib" "$r$lib" ;;
      *) install -D -m 755 "$lib" "$r/usr/lib/$triplet/${lib##*/}" ;;
    esac
  done
}
# base ROOT: busybox and all its names, users, folders. glibc looks for
# libraries in /lib/TRIPLET and /usr/lib/TRIPLET.
base() {
  local r=$1 applet
  mkdir -p "$r"/{bin,sbin,usr/bin,usr/sbin,etc,root,home,var/log,var/run,var/spool/mail,usr/share,lib64,proc,sys,dev,run}
  install -d -m 1777 "$r/tmp" "$r/var/tmp"
  cp "$(command -v busybox)" "$r/bin/busybox"
  for applet in $(busybox --list-full); do
    case ${applet##*/} in busybox | init | linuxrc) continue ;; esac
    [ -e "$r/bin/${applet##*/}" ] || ln -s busybox "$r/bin/${applet##*/}"
  done
  printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'www-data:x:33:33:www-data:/var/www:/bin/false' 'nobody:x:65534:65534:nobody:/home:/bin/false' >"$r/etc/passwd"
  printf '%s\n' 'root:x:0:' 'www-data:x:33:' 'nogroup:x:65534:' >"$r/etc/group"
  echo 'hosts: files dns' >"$r/etc/nsswitch.conf"
}
# shell ROOT makes bash the shell: Debian's busybox drops variables from the
# environment whose names a shell cannot write, such as data-1.
shell() {
  program "$1" /bin/bash
  ln -sf bash "$1/bin/sh"
}
# image FILE ROOT CONFIG NAME...
image() {
  local file=$1 r=$2 config=$3 tmp=$work/image layer id names
  shift 3
  rm -rf "$tmp" && mkdir "$tmp"
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$r" -cf "$tmp/layer.tar" .
  layer=$(sha256sum <"$tmp/layer.tar" | cut -d' ' -f1)
  printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
    "$(go env GOARCH)" "$config" "$layer" >"$tmp/config.json"
  id=$(sha256sum <"$tmp/config.json" | cut -d' ' -f1)
  mv "$tmp/config.json" "$tmp/$id.json"
  names=$(printf ',"%s"' "$@")
  printf '[{"Config":"%s.json","RepoTags":[%s],"Layers":["layer.tar"]}]' "$id" "${names#,}" >"$tmp/manifest.json"
  tar -C "$tmp" -cf "$out/$file.new" manifest.json "$id.json" layer.tar
  mv "$out/$file.new" "$out/$file"
}
# tag ID is upstream's repository and tag of an image, from its own list.
tag() {
  sed -n "s|.*configs\[$1\] = Config{list\.\([A-Za-z0-9]*\), \"\([^\"]*\)\", \"\([^\"]*\)\"}.*|\1/\2:\3|p" "$module/test/utils/image/manifest.go" |
    sed -e 's|^PromoterE2eRegistry/|registry.k8s.io/e2e-test-images/|' -e 's|^GcRegistry/|registry.k8s.io/|'
}
path='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'

echo "making the images of the suite's pods (some minutes)"
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.Version=$(cat "$module/test/images/agnhost/VERSION")" -o "$work/agnhost" k8s.io/kubernetes/test/images/agnhost
unpack curl bind9-dnsutils netcat-openbsd iproute2 socat bash nginx || { apt-get update -qq && unpack curl bind9-dnsutils netcat-openbsd iproute2 socat bash nginx; }
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
for p in /usr/bin/dig /usr/bin/nslookup /usr/bin/curl /bin/nc.openbsd /bin/ss /bin/ip /usr/bin/socat; do
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

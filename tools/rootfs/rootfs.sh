# Sourced by scripts that make images of our own from Debian's packages: each
# program with the libraries that it loads, in a root file system with little
# else. $work is a folder of the script that it removes, $out where images go.
# shellcheck shell=bash disable=SC2154

# Debian's packages and what they need and this machine lacks are unpacked into
# a folder: their services must not start here.
debs=$work/debs
unpack() {
  fetch "$@" || { apt-get update -qq && fetch "$@"; }
}
fetch() {
  local list
  list=$(apt-get install -s --no-install-recommends "$@" 2>/dev/null | awk '/^Inst/ {print $2}')
  mkdir -p "$debs/root"
  # shellcheck disable=SC2086
  (cd "$debs" && rm -f ./*.deb && apt-get download -qq -o APT::Sandbox::User=root $(printf '%s\n' "$@" $list | sort -u) && for p in *.deb; do dpkg -x "$p" root; done)
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
# folders ROOT: users, and what programs expect to be there. glibc looks for
# libraries in /lib/TRIPLET and /usr/lib/TRIPLET.
folders() {
  local r=$1
  mkdir -p "$r"/{bin,sbin,usr/bin,usr/sbin,etc,root,home,var/log,var/run,var/spool/mail,usr/share,lib64,proc,sys,dev,run}
  install -d -m 1777 "$r/tmp" "$r/var/tmp"
  printf '%s\n' 'root:x:0:0:root:/root:/bin/sh' 'www-data:x:33:33:www-data:/var/www:/bin/false' 'nobody:x:65534:65534:nobody:/home:/bin/false' >"$r/etc/passwd"
  printf '%s\n' 'root:x:0:' 'www-data:x:33:' 'nogroup:x:65534:' >"$r/etc/group"
  echo 'hosts: files dns' >"$r/etc/nsswitch.conf"
}
# base ROOT: folders, busybox and all its names.
base() {
  local r=$1 applet
  folders "$r"
  cp "$(command -v busybox)" "$r/bin/busybox"
  for applet in $(busybox --list-full); do
    case ${applet##*/} in busybox | init | linuxrc) continue ;; esac
    [ -e "$r/bin/${applet##*/}" ] || ln -s busybox "$r/bin/${applet##*/}"
  done
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
path='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'

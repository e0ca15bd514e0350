#!/usr/bin/env bash
# Runs the product in QEMU guests, which have what few test machines have:
# control groups v2 with controllers, another processor, no memory control
# group, a clock at 1970, a disk whose fsync takes 1.5 s. Pure emulation (-accel tcg): no KVM is needed.
#
#   test/vm/run.sh [SCENARIO...]     v2 arm64 nomemory clock wasm wasm-arm64 by
#                                    default; slowdisk, oci and oci-arm64 take
#                                    longest and run when they are named
#
# Needs Debian with root, or qemu-system-x86, qemu-system-arm, cpio, kmod and
# the two kernels in the cache already. Kernels are kept in ${VMCACHE:-bin/vm}.
# Exits with 0 when all scenarios passed or it had to skip (it says so).
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=$(mkdir -p "${VMCACHE:-bin/vm}" && cd "${VMCACHE:-bin/vm}" && pwd)
limit=${VM_TIMEOUT:-300} # seconds that one guest may take
scenarios=("$@")
[ $# -gt 0 ] || scenarios=(v2 arm64 nomemory clock wasm wasm-arm64)

skip() {
  echo "SKIPPED test/vm: $*" >&2
  echo "SKIPPED test/vm: nothing was tested on control groups v2, on arm64, without a memory control group, with the clock at 1970 or on a slow disk" >&2
  exit 0
}

install_programs() {
  declare -A need=([qemu-system-x86_64]=qemu-system-x86 [qemu-system-aarch64]=qemu-system-arm [cpio]=cpio [depmod]=kmod [dpkg]=dpkg [mkfs.ext4]=e2fsprogs)
  local packages=() program
  for program in "${!need[@]}"; do
    command -v "$program" >/dev/null 2>&1 || [ -x "/sbin/$program" ] || packages+=("${need[$program]}")
  done
  [ ${#packages[@]} -gt 0 ] || return 0
  { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; } || skip "not installed, and only root on Debian can install it here: ${packages[*]}"
  echo "test/vm: installing ${packages[*]}"
  export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "${packages[@]}" >/dev/null 2>&1 ||
    { apt-get update -qq && apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "${packages[@]}" >/dev/null; } ||
    skip "cannot install ${packages[*]}"
}

# What containers need, with the libraries that it loads.
containers=(runc crun conmon libc6 libseccomp2 libglib2.0-0 libpcre2-8-0 libsystemd0 libcap2 libgcrypt20 libgpg-error0 liblz4-1 liblzma5 libzstd1 libyajl2)

# fetch_kernel ARCH puts Debian's cloud kernel, its modules, busybox and what
# containers need into the cache. Its apt state is private: the machine's own apt never learns of
# another architecture.
fetch_kernel() {
  local arch=$1 w=$cache/$1 packages options
  [ ! -e "$w/ready2" ] || return 0
  command -v apt-get >/dev/null 2>&1 || { echo "test/vm: no apt-get to fetch the $arch kernel with" >&2; return 1; }
  rm -rf "$w"
  mkdir -p "$w"/apt/{lists/partial,archives/partial,state}
  : >"$w/apt/status"
  options=(-qq -o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o "Dir::State=$w/apt/state" -o "Dir::State::lists=$w/apt/lists"
    -o "Dir::State::status=$w/apt/status" -o "Dir::Cache=$w/apt" -o APT::Sandbox::User=root -o Acquire::Languages=none)
  # In what || follows, errexit does nothing.
  (
    cd "$w" &&
    apt-get "${options[@]}" update &&
    packages=$(apt-cache "${options[@]}" depends "linux-image-cloud-$arch" | awk '/Depends: linux-image/ {print $2; exit}') &&
    apt-get "${options[@]}" download "$packages" busybox-static "${containers[@]}" &&
    for d in *.deb; do dpkg -x "$d" files || exit; done &&
    PATH=$PATH:/sbin depmod -b "$w/files" "$(ls files/lib/modules)" &&
    rm -rf apt ./*.deb &&
    touch ready2
  ) || { echo "test/vm: the $arch kernel cannot be fetched" >&2; rm -rf "$w"; return 1; }
}

# build ARCH makes the initial file system of the guests: busybox, the
# product, its tests and the driver, all static.
build() {
  local arch=$1 root=$work/root-$1 version m
  mkdir -p "$root"/{bin,modules,wasm}
  export CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOFLAGS=-buildvcs=false
  go build -trimpath -ldflags '-s -w' -o "$root/" ./cmd/dunlin ./cmd/dunlin-wasm ./test/vm/guest
  if [ "$arch" = amd64 ]; then
    go test -trimpath -ldflags '-s -w' -c -o "$root/cgroup.test" ./runtime/cgroup
    go test -trimpath -ldflags '-s -w' -c -o "$root/volumes.test" ./node/volumes
    truncate -s 16M "$root/quota.img"
    PATH=$PATH:/sbin mkfs.ext4 -q -O quota,project -E quotatype=prjquota "$root/quota.img"
    truncate -s 32M "$work/slow.img"
    PATH=$PATH:/sbin mkfs.ext4 -q -J size=4 -E lazy_itable_init=0,lazy_journal_init=0 "$work/slow.img"
    gzip -c "$work/slow.img" >"$root/slow.img.gz"
  fi
  cp runtime/wasm/testdata/{print,fail,sleep,loop,grow,chello}.wasm test/vm/guest/touch.wasm "$root/wasm/"
  cp "$cache/$arch/files/bin/busybox" "$root/bin/"
  cp test/vm/init "$root/init"
  version=$(ls "$cache/$arch/files/lib/modules")
  : >"$root/modules/order"
  for m in veth ext4 loop quota_v2 $([ "$arch" != amd64 ] || echo dm-delay); do
    PATH=$PATH:/sbin modprobe -d "$cache/$arch/files" -S "$version" --show-depends "$m" | awk '$1 == "insmod" {print $2}' | while read -r f; do
      cp "$f" "$root/modules/" && { grep -qxF "$(basename "$f")" "$root/modules/order" || basename "$f" >>"$root/modules/order"; }
    done
  done
  (cd "$root" && find . | cpio -o -H newc --quiet) >"$work/initrd-$arch"
}

# build_runtimes ARCH makes the initial file system of the guests that run the
# runtimes' own tests: busybox, runc, crun, conmon, the tests, the driver.
build_runtimes() {
  local arch=$1 root=$work/root-runtimes-$1 files=$cache/$1/files version d
  version=$(ls "$files/lib/modules")
  mkdir -p "$root"/{bin,modules,tests/wasm/testdata,tests/oci/testdata}
  export CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOFLAGS=-buildvcs=false
  go build -trimpath -ldflags '-s -w' -o "$root/" ./cmd/dunlin-wasm ./test/vm/guest
  for d in wasm oci; do
    go test -trimpath -ldflags '-s -w' -c -o "$root/tests/$d/$d.test" "./runtime/$d"
  done
  cp runtime/wasm/testdata/guest.wasm "$root/tests/wasm/testdata/"
  cp runtime/oci/testdata/* "$root/tests/oci/testdata/"
  mkdir "$root"/{runc,crun}
  cp "$files/usr/bin/conmon" "$root/bin/"
  cp "$files/usr/sbin/runc" "$root/runc/"
  cp "$files/usr/bin/crun" "$root/crun/"
  for d in lib lib64 usr/lib; do # programs name ld.so and its folder
    mkdir -p "$root/$d"
    (cd "$files/$d" 2>/dev/null && find . \( -name 'ld-linux*' -o -name '*.so' -o -name '*.so.*' \) -not -path '*/gconv/*' -not -path './modules/*' | cpio -pdm --quiet "$root/$d") || true
  done
  cp "$files/bin/busybox" "$root/bin/"
  cp test/vm/init "$root/init"
  cp "$files/lib/modules/$version/kernel/fs/overlayfs/overlay.ko" "$root/modules/"
  echo overlay.ko >"$root/modules/order"
  (cd "$root" && find . | cpio -o -H newc --quiet) >"$work/initrd-runtimes-$arch"
}

# boot SCENARIO runs one guest; its verdict is the exit status.
boot() {
  local scenario=$1 arch=amd64 console=ttyS0 qemu kernel cmdline="" log=$work/$1.log start=$SECONDS status initrd="" memory=640 patience=$limit
  case $scenario in
  *arm64) arch=arm64 console=ttyAMA0 ;;
  nomemory) cmdline=cgroup_disable=memory ;;
  esac
  case $scenario in
  wasm* | oci*) initrd=runtimes- memory=1024 patience=$((limit * 9)) ;;
  slowdisk) patience=$((limit * 9)) ;; # its clock waits for the host
  esac
  case $arch in
  amd64) qemu=(qemu-system-x86_64 -M q35 -cpu max) ;;
  arm64) qemu=(qemu-system-aarch64 -M virt -cpu cortex-a53) ;;
  esac
  [ "$scenario" != clock ] || qemu+=(-rtc base=1970-01-01T00:01:00)
  # The guest's time is that of its instructions (1 ns each, less than the host
  # needs), and leaps while it waits: a busy host makes no leader or container late.
  case $scenario in slowdisk | wasm* | oci*) qemu+=(-icount "shift=0,sleep=off" -rtc clock=vm) ;; esac
  kernel=$(echo "$cache/$arch"/files/boot/vmlinuz-*)
  local TIMEFORMAT=%0U
  # What it takes of a processor is said, too: the wall's time is mostly of what runs beside it.
  { time timeout "$patience" "${qemu[@]}" -accel tcg -smp 1 -m "$memory" -nodefaults -no-reboot -display none -serial stdio \
    -kernel "$kernel" -initrd "$work/initrd-$initrd$arch" \
    -append "console=$console quiet panic=-1 cgroup_no_v1=all psi=1 dunlin.scenario=$scenario $cmdline" </dev/null >"$log" 2>&1 || true; } 2>"$work/$scenario.cpu"
  status=$(tr -d '\r' <"$log" | sed -n 's/^.*VM-EXIT=\([0-9]*\).*/\1/p' | tail -1)
  if [ "${status:-124}" = 0 ]; then
    echo "--- PASS: $scenario ($((SECONDS - start)) s, of a processor $(tail -1 "$work/$scenario.cpu") s)"
    tr -d '\r' <"$log" | grep -aE '^ +(ok|note) ' || true
    return 0
  fi
  echo "--- FAIL: $scenario ($((SECONDS - start)) s; status ${status:-none: no verdict within $patience s}); the guest's console:"
  tr -d '\r' <"$log" | tail -150 | sed 's/^/    /'
  return 1
}

install_programs
arches=() makes=()
for s in "${scenarios[@]}"; do
  case $s in
  arm64 | wasm-arm64 | oci-arm64) a=arm64 ;;
  v2 | nomemory | clock | slowdisk | wasm | oci) a=amd64 ;;
  *) echo "test/vm: no scenario $s; there are v2, arm64, nomemory, clock, slowdisk, wasm, oci, wasm-arm64, oci-arm64" >&2; exit 2 ;;
  esac
  [[ " ${arches[*]-} " == *" $a "* ]] || arches+=("$a")
  case $s in
  wasm* | oci*) make="build_runtimes $a" ;;
  *) make="build $a" ;;
  esac
  [[ "${makes[*]-}" == *"$make"* ]] || makes+=("$make")
done
fetching=()
for a in "${arches[@]}"; do fetch_kernel "$a" & fetching+=($!); done
for p in "${fetching[@]}"; do wait "$p" || skip "no kernel (apt cannot reach its servers?)"; done
work=$(mktemp -d)
trap 'rm -rf "$work"; jobs -p | xargs -r kill 2>/dev/null || true' EXIT
for m in "${makes[@]}"; do
  # shellcheck disable=SC2086
  (set -e; $m)
done
# Two guests at a time: each keeps one core busy.
failed=0
boot_all() { local bad=0 s; for s in "$@"; do boot "$s" || bad=1; done; return $bad; }
half=$(((${#scenarios[@]} + 1) / 2))
boot_all "${scenarios[@]:half}" >"$work/second.out" 2>&1 &
boot_all "${scenarios[@]:0:half}" || failed=1
wait $! || failed=1
cat "$work/second.out"
[ $failed = 0 ] && echo "test/vm: all passed: ${scenarios[*]}"
exit $failed

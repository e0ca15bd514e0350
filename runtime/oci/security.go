package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// defaultCapabilities are those that container engines agree on
// (containerd's pkg/oci/spec.go and moby's daemon/pkg/oci/caps list the same).
var defaultCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// capabilityNames by their number (capabilities(7), linux/capability.h).
var capabilityNames = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW",
	"CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT",
	"CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD",
	"CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
	"CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// ownCapabilities are what the agent may pass on: a machine that is itself
// a container need not have all.
func ownCapabilities() (bounding, effective []string) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return capabilityNames, capabilityNames
	}
	read := func(field string) (out []string) {
		_, rest, _ := strings.Cut(string(b), field+":\t")
		hex, _, _ := strings.Cut(rest, "\n")
		mask, _ := strconv.ParseUint(hex, 16, 64)
		for i, name := range capabilityNames {
			if mask&(1<<i) != 0 {
				out = append(out, name)
			}
		}
		return out
	}
	return read("CapBnd"), read("CapEff")
}

// capabilities of a container: the default ones, with what the pod adds and
// without what it drops. Adding ALL and dropping some keeps the rest;
// dropping ALL and adding some gives only those (as upstream).
func capabilities(sec workload.Security, have []string) ([]string, error) {
	if sec.Privileged {
		return slices.Clone(have), nil
	}
	all := func(list []string) bool {
		return slices.ContainsFunc(list, func(c string) bool { return strings.EqualFold(c, "ALL") })
	}
	set := slices.Clone(defaultCapabilities)
	if all(sec.AddCapabilities) {
		set = slices.Clone(have)
	}
	if all(sec.DropCapabilities) {
		set = nil
		if all(sec.AddCapabilities) {
			set = slices.Clone(have)
		}
	}
	for _, list := range []struct {
		names []string
		add   bool
	}{{sec.AddCapabilities, true}, {sec.DropCapabilities, false}} {
		for _, c := range list.names {
			if strings.EqualFold(c, "ALL") {
				continue
			}
			name := "CAP_" + strings.TrimPrefix(strings.ToUpper(c), "CAP_")
			if !slices.Contains(capabilityNames, name) {
				return nil, configError(fmt.Errorf("capability %q does not exist", c))
			}
			set = slices.DeleteFunc(set, func(s string) bool { return s == name })
			if !list.add {
				continue
			}
			if !slices.Contains(have, name) {
				return nil, configError(fmt.Errorf("capability %q: this node cannot give it", c))
			}
			set = append(set, name)
		}
	}
	set = slices.DeleteFunc(set, func(s string) bool { return !slices.Contains(have, s) })
	slices.Sort(set)
	return set, nil
}

func configError(err error) error {
	return &workload.StartError{Reason: "CreateContainerConfigError", Message: err.Error(), Err: err, Fatal: true}
}

// Paths below /proc and /sys that say more of the machine than a container
// should know, and those that it may read and not write (the lists of moby's
// daemon/pkg/oci/defaults.go and of Kubernetes' securitycontext package).
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
		"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// secure fills what protects the machine from the container.
func (r *Runtime) secure(b *specs.Spec, s workload.Spec) error {
	sec := s.Security
	caps, err := capabilities(sec, r.bounding)
	if err != nil {
		return err
	}
	// Nothing inheritable (CVE-2022-24769) nor ambient: as upstream's runtimes.
	b.Process.Capabilities = &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
	b.Process.NoNewPrivileges = sec.NoNewPrivileges
	if err := checkSysctls(sec.Sysctls, s.Namespace == ""); err != nil {
		return err
	}
	b.Linux.Sysctl = sec.Sysctls
	if sec.Privileged {
		devices, err := hostDevices("/dev")
		if err != nil {
			return err
		}
		b.Linux.Devices = devices
		b.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
		return nil
	}
	b.Linux.Resources.Devices = []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}} // the usual ones are added by the runtime
	if !sec.ProcUnmasked {
		b.Linux.MaskedPaths, b.Linux.ReadonlyPaths = maskedPaths, readonlyPaths
	}
	switch sec.Seccomp {
	case "", "RuntimeDefault":
		b.Linux.Seccomp, err = seccomp.GetDefaultProfile(b)
	case "Unconfined":
	default:
		var text []byte
		if text, err = os.ReadFile(sec.Seccomp); err == nil {
			b.Linux.Seccomp, err = seccomp.LoadProfile(string(text), b)
		}
	}
	if err != nil {
		return configError(fmt.Errorf("seccomp profile: %w", err))
	}
	return nil
}

// safeSysctls are those that touch nothing outside the pod (upstream's
// pkg/kubelet/sysctl/safe_sysctls.go). Those below net. need a network
// namespace of the pod's own.
var safeSysctls = []string{
	"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
	"net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time",
	"net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
}

func checkSysctls(want map[string]string, hostNetwork bool) error {
	for name := range want {
		clean := strings.ReplaceAll(name, "/", ".")
		switch {
		case !slices.Contains(safeSysctls, clean):
			return &workload.StartError{Reason: "SysctlForbidden", Fatal: true, Message: fmt.Sprintf("sysctl %s is not one of the safe ones", name), Hint: "allowed: " + strings.Join(safeSysctls, ", ")}
		case hostNetwork && strings.HasPrefix(clean, "net."):
			return &workload.StartError{Reason: "SysctlForbidden", Fatal: true, Message: fmt.Sprintf("sysctl %s not allowed with host net enabled", name)}
		}
	}
	return nil
}

// hostDevices are the machine's devices, for privileged containers.
func hostDevices(dir string) (out []specs.LinuxDevice, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("devices: %w", err)
	}
	for _, e := range entries {
		p := filepath.Join(dir, e.Name())
		switch {
		case e.IsDir():
			if slices.Contains([]string{"pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"}, e.Name()) {
				continue
			}
			sub, err := hostDevices(p)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
				return nil, err
			}
			out = append(out, sub...)
		case e.Name() == "console" || e.Type()&os.ModeDevice == 0:
		default:
			var st unix.Stat_t
			if unix.Lstat(p, &st) != nil {
				continue // gone meanwhile
			}
			kind := "b"
			if st.Mode&unix.S_IFMT == unix.S_IFCHR {
				kind = "c"
			}
			mode := os.FileMode(st.Mode & 0o777)
			out = append(out, specs.LinuxDevice{
				Path: p, Type: kind, Major: int64(unix.Major(uint64(st.Rdev))), Minor: int64(unix.Minor(uint64(st.Rdev))), //nolint:unconvert // differs by architecture
				FileMode: &mode, UID: &st.Uid, GID: &st.Gid,
			})
		}
	}
	return out, nil
}

package oci

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// specVersion is understood by runc 1.0 and crun 0.20 and newer.
const specVersion = "1.0.2"

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// bundle describes the container to the OCI runtime. rootfs is mounted; pod is
// the folder of what the pod's containers share.
func (r *Runtime) bundle(s workload.Spec, img *images.Image, dir, pod string) (*specs.Spec, error) {
	args := arguments(s, img.Config)
	if len(args) == 0 {
		return nil, configError(fmt.Errorf("neither the pod nor the image %s says what to run", s.Image))
	}
	rootfs := filepath.Join(dir, rootfsDir)
	u, home, err := resolveUser(rootfs, img.Config.User, s)
	if err != nil {
		return nil, err
	}
	b := &specs.Spec{
		Version:  specVersion,
		Root:     &specs.Root{Path: rootfs, Readonly: s.ReadOnlyRoot},
		Hostname: s.Hostname,
		Process: &specs.Process{
			Terminal: s.TTY, User: u, Args: args, Env: environment(s, img.Config, home),
			Cwd: cmp.Or(s.WorkingDir, img.Config.WorkingDir, "/"), Rlimits: r.rlimits(),
		},
		Mounts: mounts(s, dir, pod),
		Linux: &specs.Linux{
			CgroupsPath: r.cfg.Cgroups.Name(cgroupOf(s)),
			Resources:   r.resources(s.Resources),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace, Path: filepath.Join(pod, ipcFile)}, {Type: specs.UTSNamespace},
			},
		},
		Annotations: map[string]string{"dunlin.dev/pod": s.PodNamespace + "/" + s.PodName, "dunlin.dev/container": s.ID.Container},
	}
	if s.Namespace == "" {
		// The host's network is the host's name, too.
		b.Linux.Namespaces = b.Linux.Namespaces[:3]
		b.Hostname = ""
	} else {
		b.Linux.Namespaces = append(b.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: s.Namespace})
	}
	if adj := r.oomScore(s.Resources.OOMScoreAdj); adj != nil {
		b.Process.OOMScoreAdj = adj
	}
	if slices.ContainsFunc(s.Mounts, func(m workload.Mount) bool { return m.Propagation == "rshared" }) {
		b.Linux.RootfsPropagation = "rshared"
	} else if slices.ContainsFunc(s.Mounts, func(m workload.Mount) bool { return m.Propagation == "rslave" }) {
		b.Linux.RootfsPropagation = "rslave"
	}
	return b, r.secure(b, s)
}

// arguments follow the image's rules: a command replaces the entrypoint and
// with it the image's arguments, args replace only those.
func arguments(s workload.Spec, c images.RunConfig) []string {
	switch {
	case len(s.Command) > 0:
		return slices.Concat(s.Command, s.Args)
	case len(s.Args) > 0:
		return slices.Concat(c.Entrypoint, s.Args)
	}
	return slices.Concat(c.Entrypoint, c.Cmd)
}

// environment is the image's, replaced by the pod's by name.
func environment(s workload.Spec, c images.RunConfig, home string) []string {
	var out []string
	at := map[string]int{}
	set := func(kv string) {
		name, _, _ := strings.Cut(kv, "=")
		if i, ok := at[name]; ok {
			out[i] = kv
			return
		}
		at[name] = len(out)
		out = append(out, kv)
	}
	set(defaultPath)
	if s.Hostname != "" {
		set("HOSTNAME=" + s.Hostname)
	}
	if home != "" {
		set("HOME=" + home)
	}
	if s.TTY {
		set("TERM=xterm")
	}
	for _, kv := range slices.Concat(c.Env, s.Env) {
		set(kv)
	}
	return out
}

// cgroupOf is the container's group below the tree's root.
func cgroupOf(s workload.Spec) string {
	parent := s.CgroupParent
	if parent == "" {
		parent = "pods/" + folderName(workload.ID{PodUID: s.ID.PodUID})
	}
	return fmt.Sprintf("%s/%s-%d", parent, s.ID.Container, s.ID.Attempt)
}

// shares is the v1 weight of a CPU request: 1024 a core, at least 2.
func shares(milli int64) uint64 { return uint64(min(max(milli*1024/1000, 2), 262144)) }

// cpuPeriod of quotas, in microseconds.
const cpuPeriod = 100_000

// resources asks only for what this machine's control groups can hold; what
// they cannot is said in a node condition.
func (r *Runtime) resources(w workload.Resources) *specs.LinuxResources {
	f := r.cfg.Cgroups.Facts()
	out := &specs.LinuxResources{}
	if f.CPU {
		n := shares(cmp.Or(w.CPURequestMilli, w.CPULimitMilli))
		out.CPU = &specs.LinuxCPU{Shares: &n}
		if w.CPULimitMilli > 0 {
			quota, period := max(w.CPULimitMilli*cpuPeriod/1000, 1000), uint64(cpuPeriod)
			out.CPU.Quota, out.CPU.Period = &quota, &period
		}
	}
	if f.Memory && w.MemoryLimit > 0 {
		limit := w.MemoryLimit
		out.Memory = &specs.LinuxMemory{Limit: &limit}
		if f.Swap {
			out.Memory.Swap = &limit
		}
	}
	if f.Memory && f.Mode == "v2" {
		out.Unified = map[string]string{"memory.oom.group": "1"}
		if w.MemoryRequest > 0 {
			out.Unified["memory.low"] = fmt.Sprint(w.MemoryRequest)
		}
	}
	if f.PIDs {
		out.Pids = &specs.LinuxPids{Limit: &w.PidsLimit}
		if w.PidsLimit == 0 {
			n := int64(defaultPIDs)
			out.Pids = &specs.LinuxPids{Limit: &n}
		}
	}
	return out
}

// defaultPIDs stops a fork bomb where nobody asked for a limit.
const defaultPIDs = 4096

// oomScore keeps to what this machine allows: without CAP_SYS_RESOURCE a
// score cannot be lowered below one's own (proc_pid_oom_score_adj(5)).
func (r *Runtime) oomScore(want int) *int {
	if !slices.Contains(r.effective, "CAP_SYS_RESOURCE") {
		b, err := os.ReadFile("/proc/self/oom_score_adj")
		if err != nil {
			return nil
		}
		own := 0
		if _, err := fmt.Sscan(string(b), &own); err != nil || want < own {
			want = own
		}
	}
	return &want
}

// rlimits: the usual soft number of files, which a program may raise itself,
// as far as the agent's own bound.
func (r *Runtime) rlimits() []specs.POSIXRlimit {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return nil
	}
	hard := min(l.Max, 1<<20)
	return []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: hard, Soft: min(1024, hard)}}
}

// mounts are those that every container has, and the pod's volumes, in an
// order in which none hides another.
func mounts(s workload.Spec, dir, pod string) []specs.Mount {
	sysfs := []string{"nosuid", "noexec", "nodev", "ro"}
	if s.Security.Privileged {
		sysfs[3] = "rw"
	}
	out := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: sysfs},
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", sysfs[3]}},
		{Destination: "/dev/shm", Type: "bind", Source: filepath.Join(pod, shmDir), Options: []string{"bind", "rprivate", "rw", "nosuid", "noexec", "nodev"}},
	}
	if s.TerminationPath != "" {
		out = append(out, specs.Mount{Destination: s.TerminationPath, Type: "bind", Source: filepath.Join(dir, terminationFile), Options: []string{"bind", "rprivate", "rw"}})
	}
	vols := slices.Clone(s.Mounts)
	slices.SortStableFunc(vols, func(a, b workload.Mount) int {
		return strings.Count(filepath.Clean(a.Target), "/") - strings.Count(filepath.Clean(b.Target), "/")
	})
	for _, m := range vols {
		o := []string{"rbind", cmp.Or(m.Propagation, "rprivate"), "rw"}
		if m.ReadOnly {
			o[2] = "ro"
		}
		if m.ReadOnly && m.Recursive {
			o = append(o, "rro")
		}
		target := filepath.Clean(m.Target)
		// A volume replaces what would stand there.
		out = slices.DeleteFunc(out, func(x specs.Mount) bool { return x.Destination == target })
		out = append(out, specs.Mount{Destination: target, Type: "bind", Source: m.Source, Options: o})
	}
	return out
}

package node

import (
	"bufio"
	"bytes"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/node/network"
)

// HostMachine reads the facts of the machine it runs on.
type HostMachine struct {
	StateDir string
	Network  network.Network
	// Memory bounds what the node's pods may take together, bytes; 0 is the
	// machine's. Pods is what they take; nil: not known.
	Memory int64
	Pods   func() (workingSet int64, cpuNanos uint64, ok bool)
	// Limits says whether memory limits are enforced; an empty reason is yes.
	Limits func() (reason, message string)
	// Containers says whether OCI containers can run here: an empty reason is
	// yes, and the message then names what runs them. Nil: not said.
	Containers func() (reason, message string)
}

// Facts implements Machine.
func (h *HostMachine) Facts() MachineFacts {
	f := MachineFacts{
		Kernel: line("/proc/sys/kernel/osrelease"), OSImage: osImage(),
		MachineID: line("/etc/machine-id"), SystemUUID: line("/sys/class/dmi/id/product_uuid"),
		CPUMilli: cpuMilli(), Memory: memory(),
	}
	f.Hostname, _ = os.Hostname()
	if f.SystemUUID == "" {
		f.SystemUUID = f.MachineID
	}
	var st unix.Statfs_t
	if unix.Statfs(h.StateDir, &st) == nil {
		f.Storage = int64(st.Blocks) * int64(st.Bsize) //nolint:unconvert // differs by architecture
		f.Disk = &DiskFacts{
			Path: h.StateDir, Size: f.Storage, Inodes: int64(st.Files), InodesFree: int64(st.Ffree),
			Free: int64(st.Bavail) * int64(st.Bsize), //nolint:unconvert // differs by architecture
		}
	}
	f.FreeMemory, f.PIDs = h.freeMemory(f.Memory), pids()
	if h.Memory > 0 {
		f.Memory = min(f.Memory, h.Memory)
	}
	if h.Network != nil {
		for _, ip := range h.Network.NodeIPs() {
			f.Addresses = append(f.Addresses, ip.String())
		}
	}
	if h.Containers != nil {
		f.ContainersReason, f.ContainersMessage = h.Containers()
	}
	if h.Limits != nil {
		f.LimitsReason, f.LimitsMessage = h.Limits()
	} else if os.Geteuid() != 0 {
		f.LimitsReason, f.LimitsMessage = "NotRoot", "the agent does not run as root, so memory and CPU limits of containers are not enforced"
	}
	return f
}

// freeMemory is what is left of the bound of the node's pods, or else of the
// machine (MemAvailable, proc_meminfo(5)).
func (h *HostMachine) freeMemory(total int64) *SupplyFacts {
	if h.bounded(total) {
		used, _, ok := h.Pods()
		if !ok {
			return nil
		}
		return &SupplyFacts{Capacity: h.Memory, Available: max(h.Memory-used, 0)}
	}
	size, free := memInfo("MemTotal:"), memInfo("MemAvailable:")
	if size == 0 || free == 0 {
		return nil // kernels before 3.14 do not tell
	}
	return &SupplyFacts{Capacity: size, Available: free}
}

// pids are the process ids that the kernel gives, and those that are left;
// each thread takes one.
func pids() *SupplyFacts {
	most, err := strconv.ParseInt(line("/proc/sys/kernel/pid_max"), 10, 64)
	if err != nil {
		return nil
	}
	if n, err := strconv.ParseInt(line("/proc/sys/kernel/threads-max"), 10, 64); err == nil {
		most = min(most, n)
	}
	fields := strings.Fields(line("/proc/loadavg"))
	if len(fields) < 4 {
		return nil
	}
	_, all, _ := strings.Cut(fields[3], "/")
	n, err := strconv.ParseInt(all, 10, 64)
	if err != nil {
		return nil
	}
	return &SupplyFacts{Capacity: most, Available: max(most-n, 0)}
}

func machineBoot() string { return line("/proc/sys/kernel/random/boot_id") }

func line(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func osImage() string {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "Linux"
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"'`)
		}
	}
	return "Linux"
}

// cpuMilli is what the agent may use: its affinity, cut by the quota of its
// own control group.
func cpuMilli() int64 {
	n := int64(runtime.NumCPU()) * 1000
	if quota, period, ok := strings.Cut(ownGroup("", "cpu.max"), " "); ok {
		n = min(n, quotaMilli(quota, period))
	} else if q := ownGroup("cpu", "cpu.cfs_quota_us"); q != "" {
		n = min(n, quotaMilli(q, ownGroup("cpu", "cpu.cfs_period_us")))
	}
	return n
}

func quotaMilli(quota, period string) int64 {
	q, err1 := strconv.ParseInt(quota, 10, 64)
	p, err2 := strconv.ParseInt(period, 10, 64)
	if err1 != nil || err2 != nil || q <= 0 || p <= 0 {
		return math.MaxInt64
	}
	return max(1, q*1000/p)
}

// memory is the machine's, cut by the limit of the agent's own group.
func memory() int64 {
	total := memInfo("MemTotal:")
	for _, v := range []string{ownGroup("", "memory.max"), ownGroup("memory", "memory.limit_in_bytes")} {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil && n > 0 {
			total = min(total, n)
		}
	}
	return total
}

// memInfo is one line of proc_meminfo(5), in bytes.
func memInfo(name string) int64 {
	b, _ := os.ReadFile("/proc/meminfo")
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, name); ok {
			kib, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			return kib << 10
		}
	}
	return 0
}

// ownGroup reads a file of the agent's control group; controller "" is
// version 2. Empty when there is none.
func ownGroup(controller, file string) string {
	b, _ := os.ReadFile("/proc/self/cgroup")
	for l := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSpace(l), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if controller == "" && parts[0] != "0" {
			continue
		}
		match := controller == ""
		for _, c := range strings.Split(parts[1], ",") {
			match = match || controller != "" && c == controller
		}
		if !match {
			continue
		}
		base := filepath.Join("/sys/fs/cgroup", controller)
		for _, p := range []string{filepath.Join(base, parts[2], file), filepath.Join(base, file)} {
			if v := line(p); v != "" {
				return v
			}
		}
	}
	return ""
}

// bounded says that the node is a part of the machine only: what its pods may
// take is less than what the agent may.
func (h *HostMachine) bounded(total int64) bool {
	return h.Memory > 0 && h.Memory < total && h.Pods != nil
}

// MachineUsage implements UsageReader: proc_stat(5) and what is not available
// of the memory, both of the whole machine; of a node whose pods have a bound,
// both of the control group of its pods.
func (h *HostMachine) MachineUsage() (cpuNanos, memoryBytes uint64) {
	if h.bounded(memory()) {
		used, cpu, ok := h.Pods()
		if !ok {
			return 0, 0
		}
		return cpu, uint64(max(used, 0))
	}
	const tick = uint64(time.Second / 100) // USER_HZ
	fields := strings.Fields(firstLine("/proc/stat"))
	for i, f := range fields {
		// user, nice, system, then idle and iowait, which are no use, irq,
		// softirq, steal; what comes after is in user already.
		if n, err := strconv.ParseUint(f, 10, 64); err == nil && (i >= 1 && i <= 3 || i >= 6 && i <= 8) {
			cpuNanos += n * tick
		}
	}
	if m := h.freeMemory(memory()); m != nil {
		memoryBytes = uint64(max(m.Capacity-m.Available, 0))
	}
	return cpuNanos, memoryBytes
}

func firstLine(path string) string {
	l, _, _ := strings.Cut(line(path), "\n")
	return l
}

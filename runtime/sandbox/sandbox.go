// Package sandbox is what a workload process puts around itself before it
// runs anything untrusted: an unprivileged uid, no capabilities, no new
// privileges, a system call filter, a view of only its own files, and
// resource limits. What the machine cannot do is reported, never silent.
package sandbox

// Config says what the process still needs after Apply. Every descriptor
// that it will use must be open before.
type Config struct {
	// UID and GID are taken when >= 0 and the process is root.
	UID, GID int
	Groups   []int
	// ReadOnly and ReadWrite are the folders and files that stay reachable.
	ReadOnly  []string
	ReadWrite []string
	// Connect lets it make sockets of IPv4 and IPv6 and connect them, over TCP
	// to Ports alone (none is all); the kernel sees to that where landlock
	// knows ports (Linux 6.7). Which addresses is the process's own affair.
	Connect bool
	Ports   []uint16
	// NoFile is the limit of open descriptors; 0 keeps it.
	NoFile uint64
	// Data is the limit in bytes of private writable memory (RLIMIT_DATA);
	// 0 keeps it.
	Data uint64
}

// Facts is what Apply achieved, or Probe found possible. An empty reason
// means that the measure is in force.
type Facts struct {
	UID             int      `json:"uid"`
	NoNewPrivileges bool     `json:"noNewPrivileges"`
	LandlockABI     int      `json:"landlockABI"`
	Seccomp         bool     `json:"seccomp"`
	Missing         []string `json:"missing,omitempty"` // one sentence each
}

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"
	"unsafe"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"github.com/landlock-lsm/go-landlock/landlock"
	llsys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

// Apply shuts the process in. An error means that a measure that works on
// every Linux failed, and the guest must not run; measures that this kernel
// or architecture lacks are listed in Facts.Missing. It must be called once,
// on a process whose threads are all the Go runtime's own.
func Apply(c Config) (Facts, error) {
	f := Facts{}
	if err := limits(c); err != nil {
		return f, err
	}
	if err := allThreads(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0); err != nil {
		return f, fmt.Errorf("no_new_privs: %w", err)
	}
	f.NoNewPrivileges = true
	// Before the uid goes: the folders above the given paths may be closed
	// to it.
	if f.LandlockABI = landlockABI(); f.LandlockABI == 0 {
		f.Missing = append(f.Missing, noLandlock)
	} else if err := restrict(c); err != nil {
		return f, fmt.Errorf("landlock: %w", err)
	}
	if err := identity(c); err != nil {
		return f, err
	}
	f.UID = os.Getuid()
	if f.UID == 0 {
		f.Missing = append(f.Missing, AsRoot)
	}
	if err := seccompPossible(); err != nil {
		f.Missing = append(f.Missing, "no system call filter: "+err.Error())
		return f, nil
	}
	if err := filter(c.Connect); err != nil {
		return f, fmt.Errorf("seccomp: %w", err)
	}
	f.Seccomp = true
	return f, nil
}

// AsRoot is in Facts.Missing when the guest's uid is 0.
const AsRoot = "guests run as root: no other uid was given"

const noLandlock = "no view of files restricted by the kernel: landlock is not in this kernel or not enabled (lsm= on the kernel command line)"

// Probe says what Apply could do here, without doing it.
func Probe() Facts {
	f := Facts{UID: os.Getuid(), NoNewPrivileges: true, LandlockABI: landlockABI()}
	if f.LandlockABI == 0 {
		f.Missing = append(f.Missing, noLandlock)
	}
	if err := seccompPossible(); err != nil {
		f.Missing = append(f.Missing, "no system call filter: "+err.Error())
	} else {
		f.Seccomp = true
	}
	if f.UID != 0 {
		f.Missing = append(f.Missing, "guests run as the agent's own user: only root can give them another")
	}
	return f
}

func limits(c Config) error {
	set := func(name string, res int, v uint64) error {
		var now unix.Rlimit
		if err := unix.Getrlimit(res, &now); err != nil {
			return fmt.Errorf("limit %s: %w", name, err)
		}
		v = min(v, now.Max)
		if err := unix.Setrlimit(res, &unix.Rlimit{Cur: v, Max: v}); err != nil {
			return fmt.Errorf("limit %s: %w", name, err)
		}
		return nil
	}
	errs := []error{set("core", unix.RLIMIT_CORE, 0)}
	if c.NoFile > 0 {
		errs = append(errs, set("nofile", unix.RLIMIT_NOFILE, c.NoFile))
	}
	if c.Data > 0 {
		errs = append(errs, set("data", unix.RLIMIT_DATA, c.Data))
	}
	return errors.Join(errs...)
}

// identity gives up root, and every capability with it.
func identity(c Config) error {
	if os.Geteuid() != 0 {
		return nil
	}
	// Being root shall mean nothing from here on, not even in a program that
	// it executes. One call for what dropping each capability from the
	// bounding set would need 41 for, each of them on every thread.
	if err := allThreads(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, noRoot, 0, 0); err != nil {
		return fmt.Errorf("secure bits: %w", err)
	}
	if c.UID >= 0 {
		gid := c.GID
		if gid < 0 {
			gid = c.UID
		}
		if err := syscall.Setgroups(c.Groups); err != nil {
			return fmt.Errorf("set groups: %w", err)
		}
		if err := syscall.Setresgid(gid, gid, gid); err != nil {
			return fmt.Errorf("set gid %d: %w", gid, err)
		}
		if err := syscall.Setresuid(c.UID, c.UID, c.UID); err != nil {
			return fmt.Errorf("set uid %d: %w", c.UID, err)
		}
	}
	return dropCapabilities()
}

// noRoot are SECBIT_NOROOT, SECBIT_NO_SETUID_FIXUP cleared, and
// SECBIT_NO_CAP_AMBIENT_RAISE, locked (capabilities(7)).
const noRoot = 1<<0 | 1<<1 | 1<<6 | 1<<7

// dropCapabilities empties every set that gives a capability.
func dropCapabilities() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := allThreads(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0, 0)
	runtime.KeepAlive(&hdr)
	runtime.KeepAlive(&data)
	if err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

func allThreads(trap, a1, a2, a3, a4 uintptr) error {
	// Not syscall.AllThreadsSyscall, which refuses a program with cgo, as the
	// race detector makes it.
	if _, _, e := psx.Syscall6(trap, a1, a2, a3, a4, 0, 0); e != 0 {
		return e
	}
	return nil
}

func landlockABI() int {
	v, err := llsys.LandlockGetABIVersion()
	if err != nil || v < 1 {
		return 0
	}
	return v
}

// restrict leaves only the given paths. Symbolic links, devices and sockets
// cannot be made even there: whatever reads the folders later, with more
// rights, must not be led astray.
func restrict(c Config) error {
	// Not the newest: BestEffort takes what the kernel has.
	cfg := landlock.V6.BestEffort()
	var rules []landlock.Rule
	for _, p := range c.ReadOnly {
		rules = append(rules, rule(p, false))
	}
	for _, p := range c.ReadWrite {
		rules = append(rules, rule(p, true))
	}
	if c.Connect {
		if len(c.Ports) == 0 {
			return cfg.RestrictPaths(rules...)
		}
		for _, p := range c.Ports {
			rules = append(rules, landlock.ConnectTCP(p))
		}
	}
	return cfg.Restrict(rules...)
}

// Rights of landlock on files (linux/landlock.h).
const (
	llWriteFile  = 1 << 1
	llReadFile   = 1 << 2
	llReadDir    = 1 << 3
	llRemoveDir  = 1 << 4
	llRemoveFile = 1 << 5
	llMakeDir    = 1 << 7
	llMakeReg    = 1 << 8
	llTruncate   = 1 << 14
)

func rule(p string, writable bool) landlock.Rule {
	st, err := os.Stat(p)
	if err == nil && !st.IsDir() {
		if writable {
			return landlock.PathAccess(llReadFile|llWriteFile|llTruncate, p)
		}
		return landlock.PathAccess(llReadFile, p)
	}
	if !writable {
		return landlock.PathAccess(llReadFile|llReadDir, p)
	}
	return landlock.PathAccess(llReadFile|llReadDir|llWriteFile|llTruncate|llRemoveDir|llRemoveFile|llMakeDir|llMakeReg, p).WithRefer()
}

// seccompPossible says why there can be no filter here.
func seccompPossible() error {
	info, err := arch.GetInfo("")
	if err != nil || len(info.SyscallNames) == 0 {
		return fmt.Errorf("the filter library does not know the system calls of %s", runtime.GOARCH)
	}
	if !seccomp.Supported() {
		return errors.New("this kernel has no seccomp")
	}
	return nil
}

// allowed are the system calls of a Go program that reads and writes files
// below open folders, uses open sockets, and makes threads. There is no
// socket, connect, bind, execve, fork, mount, ptrace or kill of others.
var allowed = []string{
	// memory and threads
	"mmap", "mmap2", "munmap", "mprotect", "madvise", "mincore", "brk", "mremap",
	"futex", "futex_time64", "set_robust_list", "rseq", "sched_yield", "sched_getaffinity", "membarrier",
	"gettid", "getpid", "tgkill", "sigaltstack", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn",
	"restart_syscall", "exit", "exit_group", "arch_prctl", "set_tid_address", "set_tls", "set_thread_area", "prctl",
	// time
	"clock_gettime", "clock_gettime64", "clock_getres", "clock_getres_time64", "gettimeofday", "time", "nanosleep",
	"clock_nanosleep", "clock_nanosleep_time64", "timer_create", "timer_settime", "timer_settime64", "timer_delete",
	"timerfd_create", "timerfd_settime", "timerfd_settime64", "setitimer", "getitimer",
	// descriptors
	"read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "close", "fcntl", "fcntl64", "lseek", "_llseek",
	"ftruncate", "ftruncate64", "fsync", "fdatasync", "fstat", "fstat64", "fstatfs", "dup", "dup3", "pipe2", "eventfd2", "fallocate",
	"copy_file_range", "sendfile", "sendfile64", "splice",
	"epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "epoll_pwait2", "poll", "ppoll", "ppoll_time64", "pselect6",
	// files, below what landlock and the guest's folders leave
	"open", "openat", "openat2", "newfstatat", "fstatat", "fstatat64", "stat", "lstat", "stat64", "lstat64", "statx", "getdents64",
	"mkdirat", "unlinkat", "renameat", "renameat2", "readlinkat", "utimensat", "utimensat_time64", "fchmod", "fchmodat", "fchmodat2", "faccessat", "faccessat2",
	"getcwd", "flock",
	// open sockets
	"accept", "accept4", "recvfrom", "sendto", "recvmsg", "sendmsg", "shutdown", "getsockname", "getpeername", "setsockopt", "getsockopt",
	// the rest of the Go runtime
	"getrandom", "getrusage", "uname", "sysinfo", "getrlimit", "ugetrlimit", "prlimit64", "getuid", "getuid32", "getgid", "getgid32", "geteuid", "geteuid32", "getegid", "getegid32", "rt_sigtimedwait",
}

// filter installs the allow-list on all threads. What is not on it fails
// with EPERM: a guest never reaches it, and a Go runtime of another version
// that tries something optional goes on.
func filter(connect bool) error {
	info, err := arch.GetInfo("")
	if err != nil {
		return err
	}
	// Threads, never processes.
	conditional := []seccomp.NameWithConditions{{
		Name:       "clone",
		Conditions: []seccomp.Condition{{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD}},
	}}
	if connect {
		for _, family := range []uint64{unix.AF_INET, unix.AF_INET6} {
			conditional = append(conditional, seccomp.NameWithConditions{
				Name:       "socket",
				Conditions: []seccomp.Condition{{Argument: 0, Operation: seccomp.Equal, Value: family}},
			})
		}
	}
	list := slices.Clone(allowed)
	if connect {
		list = append(list, "connect")
	}
	names := slices.DeleteFunc(list, func(n string) bool {
		_, known := info.SyscallNames[n]
		return !known
	})
	return seccomp.LoadFilter(seccomp.Filter{
		NoNewPrivs: true,
		Flag:       seccomp.FilterFlagTSync,
		Policy: seccomp.Policy{
			DefaultAction: seccomp.ActionErrno,
			Syscalls: []seccomp.SyscallGroup{
				{Action: seccomp.ActionAllow, Names: names},
				// A C library that cannot use clone3 falls back to clone, whose
				// flags a filter can see.
				{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
				{Action: seccomp.ActionAllow, NamesWithCondtions: conditional},
			},
		},
	})
}

package sandbox

import (
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
)

// The same call has another name on other processors, and a name that a
// table lacks is left out in silence: each of these must be there under one
// of its names.
func TestCallsAreAllowedOnEveryProcessor(t *testing.T) {
	for _, info := range []*arch.Info{arch.X86_64, arch.AARCH64, arch.ARM} {
		for _, call := range [][]string{
			{"newfstatat", "fstatat", "fstatat64"}, {"mmap", "mmap2"}, {"fcntl", "fcntl64"}, {"fstat", "fstat64"}, {"lseek", "_llseek"},
			{"ftruncate", "ftruncate64"}, {"epoll_wait", "epoll_pwait"}, {"getuid", "getuid32"}, {"openat"}, {"futex"}, {"ppoll", "poll"},
			{"sendfile", "sendfile64"}, {"clock_gettime"}, {"getdents64"}, {"readlinkat"}, {"accept4"}, {"getrandom"}, {"exit_group"},
		} {
			found := false
			for _, name := range allowed {
				for _, c := range call {
					_, known := info.SyscallNames[c]
					found = found || c == name && known
				}
			}
			if !found {
				t.Errorf("%s: none of %v is allowed", info.Name, call)
			}
		}
	}
}

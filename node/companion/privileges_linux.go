package companion

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// DropPrivileges leaves this process what listening on low ports needs, and
// nothing else, for ever. Threads inside other namespaces are made before.
// Without root there is nothing to drop.
func DropPrivileges() error {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0); errno != 0 {
		return fmt.Errorf("no new privileges: %w", errno)
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have, want [2]unix.CapUserData
	if err := unix.Capget(&head, &have[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	bit := have[0].Permitted & (1 << unix.CAP_NET_BIND_SERVICE)
	want[0] = unix.CapUserData{Effective: bit, Permitted: bit}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&want[0])), 0); errno != 0 {
		return fmt.Errorf("drop capabilities: %w", errno)
	}
	return nil
}

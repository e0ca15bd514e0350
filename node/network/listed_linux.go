package network

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// mostLists is how often a table is read that changes each time.
const mostLists = 20

// listed reads one of the kernel's tables again that changed while it was read
// (NLM_F_DUMP_INTR of netlink(7)): what others do on the machine at the time,
// with links of their own, is no fault.
func listed[T any](list func() ([]T, error)) (out []T, err error) {
	for range mostLists {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, err
}

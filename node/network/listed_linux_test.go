package network

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestListedAgain: a table that changes while it is read is read again, one
// that cannot be read is not, and one that always changes ends.
func TestListedAgain(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		errs  []error // the last one for ever
		want  error
		asked int
	}{
		"quiet":  {[]error{nil}, nil, 1},
		"busy":   {[]error{netlink.ErrDumpInterrupted, netlink.ErrDumpInterrupted, nil}, nil, 3},
		"broken": {[]error{netlink.ErrDumpInterrupted, broken}, broken, 2},
		"always": {[]error{netlink.ErrDumpInterrupted}, netlink.ErrDumpInterrupted, mostLists},
	} {
		asked := 0
		out, err := listed(func() ([]int, error) {
			e := c.errs[min(asked, len(c.errs)-1)]
			asked++
			return []int{asked}, e
		})
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) || asked != c.asked || err == nil && out[0] != asked {
			t.Errorf("%s: %v, %v, asked %d times", name, out, err, asked)
		}
	}
}

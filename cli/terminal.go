package cli

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/dunlin-project/dunlin/cli/client"
)

// terminal is this command's, passed on to a program elsewhere: raw, so that
// also Ctrl-C goes there.
type terminal struct {
	sizes   chan client.TerminalSize
	restore func()
}

// terminal takes the terminal over. nil is none, with a note: the program runs
// without.
func (a *app) terminal(stdin bool) (*terminal, error) {
	f, ok := a.in.(*os.File)
	switch {
	case !stdin:
		a.notef("Note: -t without -i makes no terminal.\n")
		return nil, nil
	case !ok || !term.IsTerminal(int(f.Fd())):
		a.notef("Note: the input is not a terminal, so -t makes none.\n")
		return nil, nil
	}
	fd := int(f.Fd())
	before, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("make the terminal raw: %w", err)
	}
	t := &terminal{sizes: make(chan client.TerminalSize)}
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	changed <- syscall.SIGWINCH // the first size
	done := make(chan struct{})
	go t.watch(fd, changed, done)
	t.restore = func() {
		signal.Stop(changed)
		close(done)
		_ = term.Restore(fd, before) // what is printed next shows if it failed
	}
	return t, nil
}

// watch tells the terminal's size, and each new one.
func (t *terminal) watch(fd int, changed <-chan os.Signal, done <-chan struct{}) {
	for {
		select {
		case <-changed:
		case <-done:
			return
		}
		w, h, err := term.GetSize(fd)
		if err != nil {
			continue // a terminal that is gone has no size
		}
		select {
		case t.sizes <- client.TerminalSize{Width: uint16(w), Height: uint16(h)}:
		case <-done:
			return
		}
	}
}

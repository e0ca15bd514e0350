package host

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/sandbox"
)

// compile fills the folder on fdRunDir with compiled code and answers when
// it is whole. It runs as the unprivileged owner of that folder, under the
// memory limit that the Spec says.
func compile() int {
	spec, err := receive()
	reply := os.NewFile(fdReply, "reply")
	go endWithReader(fdReply)
	if err != nil {
		answer(reply, Reply{Reason: ReasonStart, Message: err.Error()})
		return 1
	}
	if err := compileSpec(spec); err != nil {
		r := Reply{Reason: ReasonStart, Message: clip(err.Error())}
		if errors.Is(err, unix.ENOSPC) {
			r.Reason = ReasonNoSpace
		}
		answer(reply, r)
		return 1
	}
	answer(reply, Reply{Running: true})
	return 0
}

func compileSpec(spec Spec) error {
	module, err := mapModule(fdModule)
	if err != nil {
		return err
	}
	if err := unix.Fchdir(fdRunDir); err != nil {
		return fmt.Errorf("cache folder: %w", err)
	}
	_, err = sandbox.Apply(sandbox.Config{
		UID: spec.Sandbox.UID, GID: spec.Sandbox.GID, Data: spec.Sandbox.Data,
		ReadWrite: []string{"."}, NoFile: 256,
	})
	if err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	return Wazero{}.Compile(context.Background(), module, "/proc/self/cwd")
}

// endWithReader ends the process once nobody reads its answer any more: what
// an agent or an import that was killed wanted compiled, the next one asks for
// again, and two would take two cores and twice the memory.
func endWithReader(fd int) {
	p := []unix.PollFd{{Fd: int32(fd)}}
	for {
		_, err := unix.Ppoll(p, nil, nil)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR):
			return
		case err == nil && p[0].Revents&(unix.POLLERR|unix.POLLHUP|unix.POLLNVAL) != 0:
			os.Exit(1)
		}
	}
}

package host

import (
	"context"
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
	if err != nil {
		answer(reply, Reply{Reason: ReasonStart, Message: err.Error()})
		return 1
	}
	if err := compileSpec(spec); err != nil {
		answer(reply, Reply{Reason: ReasonStart, Message: clip(err.Error())})
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

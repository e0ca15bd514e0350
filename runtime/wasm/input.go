package wasm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

var _ workload.Inputter = (*Runtime)(nil)

// Input implements workload.Inputter.
func (r *Runtime) Input(_ context.Context, id workload.ID) (io.WriteCloser, error) {
	// Not waiting: without its guest the pipe has no reader.
	f, err := os.OpenFile(filepath.Join(r.folder(id), host.StdinPipe), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		err = errors.New("it was started without one (stdin: true asks for it)")
	}
	if err != nil {
		return nil, fmt.Errorf("standard input of %s: %w", id.Container, err)
	}
	return f, nil
}

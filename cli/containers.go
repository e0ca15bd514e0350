package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/oci"
	"github.com/dunlin-project/dunlin/runtime/wasm"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// containers is the node's part that runs OCI containers, if it can.
type containers struct {
	runtime *oci.Runtime // nil: it cannot
	// reason and message are for the node's condition.
	reason, message string
}

func ociConfig(o nodeOptions, tree *cgroup.Tree, log *slog.Logger) oci.Config {
	return oci.Config{StateDir: filepath.Join(o.state, "oci"), RunDir: filepath.Join(o.run, "oci"), Cgroups: tree, Logger: log}
}

// openContainers looks for the programs that containers need. Their absence
// is no error: the node runs Wasm modules only, and says so.
func openContainers(ctx context.Context, o nodeOptions, tree *cgroup.Tree, images oci.Images, log *slog.Logger) (*containers, error) {
	cfg := ociConfig(o, tree, log)
	var err error
	var missing *oci.MissingError
	switch cfg.Programs, err = oci.Find(ctx, cfg.RunDir, tree); {
	case errors.As(err, &missing):
		c := &containers{reason: "MissingPrograms", message: "the node runs Wasm modules only: " + missing.Error()}
		if os.Geteuid() != 0 {
			c.reason = "NotRoot"
		}
		log.Info("this node runs no OCI containers", "reason", missing.Error(), "hint", "it needs runc or crun, and conmon (Debian: apt-get install runc conmon)")
		return c, nil
	case err != nil:
		return nil, err
	}
	cfg.Images = images
	if cfg.Host, err = wasm.FindHost(""); err != nil {
		return nil, err
	}
	rt, err := oci.New(cfg)
	if err != nil {
		return nil, err
	}
	return &containers{runtime: rt, message: fmt.Sprintf("containers are run by %s, watched by conmon", cfg.Programs.Version)}, nil
}

// runtimes of the node by handler.
func (p *nodeProcess) runtimes() map[string]workload.Runtime {
	m := map[string]workload.Runtime{p.runtime.Name(): p.runtime}
	if p.containers.runtime != nil {
		m[p.containers.runtime.Name()] = p.containers.runtime
	}
	return m
}

// sweepContainers ends every container that an agent with these folders
// left. Those that were made remember by which program.
func sweepContainers(ctx context.Context, o nodeOptions, tree *cgroup.Tree) error {
	cfg := ociConfig(o, tree, slog.New(slog.DiscardHandler))
	if _, err := os.Stat(cfg.RunDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	rt, err := oci.New(cfg)
	if err != nil {
		return err
	}
	list, err := rt.List(ctx)
	errs := []error{err}
	for _, st := range list {
		errs = append(errs, rt.Kill(ctx, st.ID), rt.Remove(ctx, st.ID))
	}
	return errors.Join(append(errs, rt.RemovePods(), rt.Close())...)
}

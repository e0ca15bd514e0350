package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/node/ingress"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/wasm"
)

// addPlace adds the flags that say where an agent is, for commands that clean
// up after it.
func (o *nodeOptions) addPlace(c *cobra.Command) {
	d := defaultDirs()
	f := c.Flags()
	f.StringVar(&o.state, "state-dir", d.state, "the agent's")
	f.StringVar(&o.run, "run-dir", d.run, "the agent's")
	f.StringVar(&o.config, "config-dir", d.config, "the agent's")
	f.StringVar(&o.netns, "netns", "dunlin", "the agent's")
	f.StringVar(&o.cgroup, "cgroup", "", "the agent's")
}

// place completes what addPlace added.
func (o *nodeOptions) place() error {
	if o.netns == "" || len(o.netns) > 12 || !plainName(o.netns) {
		return usagef("--netns=%s: a name of 1 to 12 letters, digits, '-', '_' and '.', which does not begin with '.'", o.netns)
	}
	if o.cgroup != "" && !plainName(o.cgroup) {
		return usagef("--cgroup=%s: a name of letters, digits, '-', '_' and '.', which does not begin with '.'; it stands below the root of the control groups", o.cgroup)
	}
	for _, p := range []*string{&o.state, &o.run, &o.config} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return fmt.Errorf("folder %s: %w", *p, err)
		}
		*p = abs
	}
	if o.cgroup == "" {
		o.cgroup = o.netns
	}
	return nil
}

func (a *app) sweepCmd() *cobra.Command {
	var o nodeOptions
	c := &cobra.Command{
		Use: "sweep", Short: "Stop every workload of this machine and remove its network namespace and control groups",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.place(); err != nil {
				return err
			}
			if err := o.anothers(); err != nil {
				return err
			}
			return sweepMachine(cmd.Context(), o)
		},
	}
	o.addPlace(c)
	return c
}

// untouched remembers which folders are there; the function that it returns
// removes the others, with what is in them.
func untouched(folders ...string) (restore func() error) {
	var missing []string
	for _, f := range folders {
		if !fileThere(f) {
			missing = append(missing, f)
		}
	}
	return func() error {
		var errs []error
		for _, f := range missing {
			errs = append(errs, os.RemoveAll(f))
		}
		return errors.Join(errs...)
	}
}

// sweepMachine stops every workload of this machine and removes what the
// agent made outside its folders: network namespace, control groups, mounts.
func sweepMachine(ctx context.Context, o nodeOptions) error {
	made := untouched(o.state, filepath.Join(o.state, "wasm"), filepath.Join(o.state, "oci"), filepath.Join(o.state, "volumes"), filepath.Join(o.run, "volumes"))
	hadRun := fileThere(o.run)
	held, err := o.claims()
	if err != nil {
		return err // a living agent would start everything again
	}
	defer func() {
		held.release()
		if !hadRun {
			_ = os.Remove(o.run)
		}
	}()
	errs := []error{proxy.Stop(ctx, proxyDir(o.run)), ingress.Stop(ctx, ingressDir(o.run))}
	tree := cgroup.New(cgroup.Config{Name: o.cgroup})
	if _, err := os.Stat(filepath.Join(o.run, "wasm")); !errors.Is(err, fs.ErrNotExist) {
		rt, err := wasm.New(wasm.Config{StateDir: filepath.Join(o.state, "wasm"), RunDir: filepath.Join(o.run, "wasm"), Cgroups: tree, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		list, err := rt.List(ctx)
		errs = append(errs, err)
		for _, st := range list {
			errs = append(errs, rt.Kill(ctx, st.ID), rt.Remove(ctx, st.ID))
		}
		errs = append(errs, rt.Close())
	}
	errs = append(errs, sweepContainers(ctx, o, tree))
	if vols, err := volumes.New(volumes.Config{Dir: filepath.Join(o.state, "volumes"), MemoryDir: filepath.Join(o.run, "volumes"), Logger: slog.New(slog.DiscardHandler)}); err == nil {
		uids, err := vols.List()
		errs = append(errs, err)
		for _, uid := range uids {
			errs = append(errs, vols.Teardown(ctx, uid))
		}
	}
	within, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	groups := errors.Join(tree.End(within, ""), tree.Destroy())
	if os.Geteuid() != 0 && errors.Is(groups, fs.ErrPermission) {
		groups = nil // root's agent has the name; this user's had no control groups
	}
	errs = append(errs, groups)
	if os.Geteuid() == 0 {
		if n, err := network.NewNamespaced(o.netns, []netip.Addr{netip.MustParseAddr("127.0.0.1")}); err == nil {
			n.UseCNI(o.plugins(nil))
			errs = append(errs, n.Destroy(), network.Restore(netnsClaims, o.othersRun))
		}
	}
	return errors.Join(append(errs, made())...)
}

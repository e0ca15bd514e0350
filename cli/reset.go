package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/pki"
)

func (a *app) agentResetCmd() *cobra.Command {
	var o nodeOptions
	var yes bool
	c := &cobra.Command{
		Use:   "reset [--yes]",
		Short: "Make this machine forget which node it was",
		Long: `Make this machine forget which node it was: for the copy of another machine's
disk, for a node that was declared dead or revoked, and for a machine that shall
join another cluster.

Its workloads are stopped, and its key, its certificate, what it knew of its pods
and their local volumes are removed. Imported modules and static pods stay. The
agent must not be running. After that the machine joins with a new line from
'dunlin token create'.`,
		Example: `  dunlin agent reset
  dunlin agent reset --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.place(); err != nil {
				return err
			}
			if err := o.anothers(); err != nil {
				return err
			}
			return a.resetNode(cmd.Context(), o, yes)
		},
	}
	o.addPlace(c)
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

// resetNode removes the node's identity and what belongs to it.
func (a *app) resetNode(ctx context.Context, o nodeOptions, yes bool) error {
	held, err := o.claims()
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	held.release() // sweeping takes them again
	nodeDir := filepath.Join(o.state, "node")
	what, err := resetList(o, nodeDir)
	if err != nil {
		return err
	}
	if len(what) == 0 {
		a.printf("There is no node in %s: nothing to forget.\n", o.state)
		return nil
	}
	a.notef("This removes from the machine:\n")
	for _, w := range what {
		a.notef("  %s\n", w)
	}
	a.notef("It keeps imported modules (%s) and static pods (%s).\n", filepath.Join(o.state, "wasm"), filepath.Join(o.config, "manifests"))
	if kept, err := os.ReadDir(o.claimsDir()); err == nil && len(kept) > 0 {
		a.notef("The data of %d volumes stays in %s: no cluster that this machine joins later uses it. Remove it by hand when it is not wanted.\n", len(kept), o.claimsDir())
	}
	if !yes && !a.confirm("Forget the node, and stop its workloads?") {
		return errors.New("nothing was changed")
	}
	if err := sweepMachine(ctx, o); err != nil {
		return fmt.Errorf("stop workloads: %w", err)
	}
	if err := forgetNode(o, nodeDir); err != nil {
		return err
	}
	a.printf("This machine is no node any more: 'dunlin agent --join LINE', with a line from 'dunlin token create', makes it one.\n")
	return nil
}

// resetList says what a reset removes, for people.
func resetList(o nodeOptions, nodeDir string) ([]string, error) {
	var out []string
	if fileThere(filepath.Join(nodeDir, "identity")) {
		who := "the node's key and certificate"
		id, err := pki.OpenNodeIdentity(filepath.Join(nodeDir, "identity"))
		switch {
		case err != nil:
			who += fmt.Sprintf(" (not readable: %v)", err)
		case id.Joined():
			g := id.Grant()
			who += fmt.Sprintf(" (%s of cluster %s)", g.NodeName, g.ClusterID)
		}
		out = append(out, who+": "+filepath.Join(nodeDir, "identity"))
	}
	if fileThere(filepath.Join(nodeDir, "node.db")) {
		out = append(out, "what it knew of its pods, their Secrets and their logs: "+nodeDir)
	}
	if vols, err := os.ReadDir(filepath.Join(o.state, "volumes")); err == nil && len(vols) > 0 {
		out = append(out, fmt.Sprintf("local volumes of %d pods: %s", len(vols), filepath.Join(o.state, "volumes")))
	}
	if runs, err := os.ReadDir(filepath.Join(o.run, "wasm")); err == nil && len(runs) > 0 {
		out = append(out, fmt.Sprintf("%d containers, which are stopped: %s", len(runs), filepath.Join(o.run, "wasm")))
	}
	old, err := filepath.Glob(nodeDir + forgotten + "*")
	if err != nil {
		return nil, fmt.Errorf("look for what an earlier reset left: %w", err)
	}
	if len(old) > 0 {
		out = append(out, "what an earlier reset left: "+strings.Join(old, ", "))
	}
	return out, nil
}

// forgotten is what the folder of a node that was forgotten is called until
// it is removed: renamed first, so that half of it is never used.
const forgotten = ".forgotten"

func forgetNode(o nodeOptions, nodeDir string) error {
	if fileThere(nodeDir) {
		away, err := os.MkdirTemp(o.state, "node"+forgotten)
		if err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		if err := os.Rename(nodeDir, filepath.Join(away, "node")); err != nil {
			return fmt.Errorf("forget the node: %w", err)
		}
		// The latest time that was known is the machine's, not the node's.
		if err := os.MkdirAll(nodeDir, 0o700); err == nil {
			_ = os.Rename(filepath.Join(away, "node", "time-floor"), filepath.Join(nodeDir, "time-floor"))
		}
	}
	old, err := filepath.Glob(filepath.Join(o.state, "node"+forgotten+"*"))
	if err != nil {
		return fmt.Errorf("look for what is left: %w", err)
	}
	for _, dir := range append(old, filepath.Join(o.state, "volumes"), filepath.Join(o.run, "volumes")) {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove: %w; run the command again", err)
		}
	}
	return nil
}

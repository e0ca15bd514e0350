package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/consensus"
)

func (a *app) snapshotCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "snapshot", Short: "Save the cluster's state to a file, check one, restore one", Args: cobra.NoArgs,
		Long: `Save the cluster's state to a file, check one, restore one.

A snapshot holds every object of the API. Secrets in it are sealed, and the key
is not in it: it restores a server whose folder STATE-DIR/server/pki is still
there, so keep a copy of that folder apart from the snapshots.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.AddCommand(a.snapshotSaveCmd(), a.snapshotVerifyCmd(), a.snapshotRestoreCmd())
	return c
}

func (a *app) snapshotSaveCmd() *cobra.Command {
	return &cobra.Command{
		Use: "save FILE", Short: "Save the state of the running cluster", Args: cobra.ExactArgs(1),
		Example: `  dunlin snapshot save /mnt/usb/dunlin-$(date +%F).snapshot`,
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			if _, err := os.Stat(args[0]); err == nil {
				return fmt.Errorf("%s exists already", args[0])
			}
			body, err := cl.Do(cmd.Context(), client.Request{Method: http.MethodGet, Path: controlplane.SnapshotPath, Accept: "application/octet-stream"})
			if err != nil {
				return err
			}
			info, err := keepSnapshot(args[0], body)
			if err = errors.Join(err, body.Close()); err != nil {
				return err
			}
			a.notef("saved: %s\n", describeImage(info))
			return nil
		},
	}
}

// keepSnapshot writes a file, checks it, and only then gives it its name.
func keepSnapshot(path string, body io.Reader) (info consensus.ImageInfo, err error) {
	tmp := path + ".part"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	defer func() { _ = os.Remove(tmp) }()
	_, err = io.Copy(f, body)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	if info, err = verifySnapshot(tmp); err != nil {
		return info, err
	}
	if err := os.Rename(tmp, path); err != nil {
		return info, fmt.Errorf("snapshot: %w", err)
	}
	return info, nil
}

func verifySnapshot(path string) (consensus.ImageInfo, error) {
	dir, err := os.MkdirTemp("", "dunlin-snapshot-")
	if err != nil {
		return consensus.ImageInfo{}, fmt.Errorf("snapshot: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	return consensus.ReadImageFile(path, filepath.Join(dir, "image.db"))
}

func describeImage(i consensus.ImageInfo) string {
	return fmt.Sprintf("cluster %s, %d objects, version %d, recovery epoch %d, %d bytes", i.ClusterID, i.Objects, i.Version, i.Epoch, i.Bytes)
}

func (a *app) snapshotVerifyCmd() *cobra.Command {
	return &cobra.Command{
		Use: "verify FILE", Short: "Check a snapshot, byte by byte and object by object", Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			info, err := verifySnapshot(args[0])
			if err != nil {
				return err
			}
			a.printf("good: %s\n", describeImage(info))
			return nil
		},
	}
}

// offlineCommand is what recover and restore share: they change the folder of
// a server that does not run, only when told so.
func (a *app) offlineCommand(use, short, long, example string, args cobra.PositionalArgs, change func(cmd *cobra.Command, stateDir string, args []string, log *slog.Logger) (consensus.Recovered, error)) *cobra.Command {
	var stateDir string
	var yes bool
	c := &cobra.Command{
		Use: use, Short: short, Long: long, Example: example, Args: args,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !yes {
				return usagef("this makes the server of %s the only one of its cluster, and shuts all others out until they join again; say --yes if that is meant", stateDir)
			}
			log := slog.New(slog.NewTextHandler(a.errw, &slog.HandlerOptions{Level: slog.LevelWarn}))
			dir := filepath.Join(stateDir, "server")
			var out consensus.Recovered
			err := controlplane.CheckLost(cmd.Context(), dir, log)
			if err == nil {
				out, err = change(cmd, dir, args, log)
			}
			if errors.Is(err, consensus.ErrLocked) {
				return fmt.Errorf("the server is running: %w", err)
			}
			if err != nil {
				return err
			}
			a.notef("done: cluster %s, version %d, recovery epoch %d\n", out.ClusterID, out.Version, out.Epoch)
			if out.Moved != "" {
				a.notef("the state before is in %s\n", out.Moved)
			}
			a.notef("Nodes that have a newer state than this hold what they run, and say so ('dunlin get nodes': HeldAfterRestore). Apply again what shall stay; then 'dunlin node accept-restore NAME' (or --all) makes them follow.\n")
			a.notef("Start this server now. Nodes come back by themselves. On every other server: stop it, remove its --state-dir/server, and start it with --join and a new line of 'dunlin token create --server'.\n")
			return nil
		},
	}
	c.Flags().StringVar(&stateDir, "state-dir", defaultDirs().state, "the server's state folder")
	c.Flags().BoolVar(&yes, "yes", false, "do it")
	return c
}

func (a *app) snapshotRestoreCmd() *cobra.Command {
	return a.offlineCommand("restore FILE --yes", "Replace the state of a stopped server by a snapshot",
		`Replace the state of a stopped server by a snapshot.

The server is then the only one of its cluster, in a new recovery epoch: other
servers are shut out until they join again. The state before is kept beside.
Nodes that have seen a newer state do not roll back: they hold what they have of
it, and say so, until 'dunlin node accept-restore' lets them follow.`,
		`  dunlin snapshot restore /mnt/usb/dunlin-2026-11-30.snapshot --yes`, cobra.ExactArgs(1),
		func(cmd *cobra.Command, stateDir string, args []string, log *slog.Logger) (consensus.Recovered, error) {
			return controlplane.Restore(cmd.Context(), stateDir, args[0], log)
		})
}

func (a *app) serverRecoverCmd() *cobra.Command {
	return a.offlineCommand("recover --yes", "Go on with this stopped server alone, when most servers are lost for good",
		`Go on with this stopped server alone, when most servers are lost for good.

Run it on one server that is left, stopped: the one that 'dunlin server list'
shows, or whose log ends, last. Its state and its keys stay; nodes trust it as
before and their workloads are not touched. It begins a new recovery epoch:
lost servers that come back are shut out, with a line that says so, and join
again as new ones. What was acknowledged only by the lost servers is lost.

Do not use it while the others can be brought back: starting them is enough. It
refuses while so many others answer that with this server they are a quorum;
behind a cut link it cannot know.`,
		`  dunlin server recover --yes`, cobra.NoArgs,
		func(cmd *cobra.Command, stateDir string, _ []string, log *slog.Logger) (consensus.Recovered, error) {
			return controlplane.Recover(cmd.Context(), stateDir, log)
		})
}

package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/dunlin-project/dunlin/internal/version"
)

func (a *app) versionCmd() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := map[string]string{
				"version": version.Version, "revision": version.Revision(), "platform": version.Platform(),
				"go": runtime.Version(), "kubernetesAPI": version.Kubernetes,
			}
			if output != "" {
				if output != "json" && output != "yaml" {
					return usagef("output format %q: yaml and json are known", output)
				}
				return a.marshal(v, output)
			}
			a.printf("dunlin %s (%s, %s), Kubernetes API %s\n", v["version"], v["platform"], v["go"], v["kubernetesAPI"])
			return nil
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "yaml or json")
	return c
}

// confirm asks on a terminal; elsewhere the answer is no.
func (a *app) confirm(question string) bool {
	f, ok := a.in.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		a.notef("Not a terminal: use --yes.\n")
		return false
	}
	a.notef("%s [y/N] ", question)
	line, err := bufio.NewReader(a.in).ReadString('\n')
	return err == nil && strings.HasPrefix(strings.ToLower(strings.TrimSpace(line)), "y")
}

// dirs are the folders of this machine's server or agent.
type dirs struct {
	state, run, config string
}

// The folders of root's agent.
const (
	systemRun   = "/run/dunlin"
	systemState = "/var/lib/dunlin"
)

// anothers refuses to clean up after an agent of another user's, which would
// find nothing and say that all is well.
func (o *nodeOptions) anothers() error {
	if os.Geteuid() == 0 {
		return nil
	}
	for _, dir := range []string{o.state, o.run} {
		if err := unix.Access(dir, unix.R_OK|unix.W_OK|unix.X_OK); errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%s is another user's: become that user, or root (try sudo)", dir)
		}
	}
	return o.rootsInstead(defaultDirs(), systemState, systemRun)
}

// rootsInstead is an error where nothing is in a user's usual folders, and
// there are root's.
func (o *nodeOptions) rootsInstead(usual dirs, roots ...string) error {
	if o.state != usual.state || fileThere(filepath.Join(o.state, "node")) {
		return nil
	}
	for _, dir := range roots {
		if fileThere(dir) {
			return fmt.Errorf("there is no agent of yours in %s, and one of root's in %s: try sudo for that", o.state, dir)
		}
	}
	return nil
}

// writable says whether files can be made in the folder, or the folder itself
// where it is not there yet. Nothing is made.
func writable(dir string) error {
	for !fileThere(dir) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// defaultDirs are the system's as root, and the XDG folders otherwise.
func defaultDirs() dirs {
	if os.Geteuid() == 0 {
		return dirs{state: "/var/lib/dunlin", run: systemRun, config: "/etc/dunlin"}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = os.TempDir()
	}
	pick := func(env, def string) string {
		// What is not absolute is to be ignored (XDG Base Directory Specification).
		if v := os.Getenv(env); filepath.IsAbs(v) {
			return filepath.Join(v, "dunlin")
		}
		return def
	}
	return dirs{
		state:  pick("XDG_STATE_HOME", filepath.Join(home, ".local", "state", "dunlin")),
		run:    pick("XDG_RUNTIME_DIR", filepath.Join(os.TempDir(), fmt.Sprintf("dunlin-%d", os.Geteuid()))),
		config: pick("XDG_CONFIG_HOME", filepath.Join(home, ".config", "dunlin")),
	}
}

package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/dunlin-project/dunlin/cli/install"
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

func (a *app) installCmd() *cobra.Command {
	var join string
	var noStart bool
	c := &cobra.Command{
		Use:   "install server | install agent --join LINE",
		Short: "Install this binary as a system service that starts at boot",
		Long: `Install this binary as a system service that starts at boot.

Copies the binary to /usr/local/bin, writes one systemd unit and makes
/etc/dunlin and /var/lib/dunlin. 'dunlin uninstall' takes all of it away.`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"server", "agent"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if os.Geteuid() != 0 {
				return errors.New("installing a system service needs root: run it with sudo")
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find own binary: %w", err)
			}
			did, err := install.Install(install.Options{Role: args[0], JoinLine: join, Self: self})
			for _, s := range did {
				a.printf("%s\n", s)
			}
			if err != nil || noStart {
				return err
			}
			return a.systemctl(cmd.Context(), true)
		},
	}
	c.Flags().StringVar(&join, "join", "", "join line from 'dunlin token create' (agent)")
	c.Flags().BoolVar(&noStart, "no-start", false, "do not enable and start the unit")
	return c
}

// systemctl enables and starts the unit, or stops and disables it; without a
// running systemd it says so, and that is no error.
func (a *app) systemctl(ctx context.Context, on bool) error {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		if on {
			a.notef("systemd is not running here: start it yourself with '/usr/local/bin/dunlin server' (or agent).\n")
		}
		return nil
	}
	run := func(args ...string) error {
		out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
		}
		return nil
	}
	if on {
		return errors.Join(run("daemon-reload"), run("enable", "--now", install.UnitName))
	}
	_ = run("disable", "--now", install.UnitName) // not there is fine
	return nil
}

func (a *app) uninstallCmd() *cobra.Command {
	var yes, keep bool
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Stop all workloads of this machine and remove Dunlin, its state included",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("uninstalling needs root: run it with sudo")
			}
			if !yes && !a.confirm("Stop all workloads of this machine and remove Dunlin with its state?") {
				return errors.New("nothing was changed")
			}
			if err := a.systemctl(cmd.Context(), false); err != nil {
				return err
			}
			p := install.Paths{}
			if err := sweepMachine(cmd.Context(), nodeOptions{dirs: dirs{state: p.State(), run: p.Run()}, netns: "dunlin", cgroup: "dunlin"}); err != nil {
				return err
			}
			did, err := install.Remove(p, keep)
			for _, s := range did {
				a.printf("%s\n", s)
			}
			if err != nil {
				return err
			}
			if _, serr := os.Stat("/run/systemd/system"); serr == nil {
				_ = exec.CommandContext(cmd.Context(), "systemctl", "daemon-reload").Run()
			}
			return nil
		},
	}
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&keep, "keep-state", false, "keep /var/lib/dunlin and /etc/dunlin")
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

// defaultDirs are the system's as root, and the XDG folders otherwise.
func defaultDirs() dirs {
	if os.Geteuid() == 0 {
		return dirs{state: "/var/lib/dunlin", run: "/run/dunlin", config: "/etc/dunlin"}
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = os.TempDir()
	}
	pick := func(env, def string) string {
		if v := os.Getenv(env); v != "" {
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

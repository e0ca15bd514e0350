package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/cli/install"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/runtime/wasm"
)

func (a *app) installCmd() *cobra.Command {
	var join string
	var noStart, force bool
	c := &cobra.Command{
		Use:   "install server | install agent --join LINE",
		Short: "Install this binary as a system service that starts at boot",
		Long: `Install this binary as a system service that starts at boot.

Copies the binary to /usr/local/bin, writes one systemd unit and makes
/etc/dunlin and /var/lib/dunlin, or the folders that /etc/dunlin/config.yaml
names. 'dunlin uninstall' takes all of it away.
Installing again replaces the program; --force is needed to make an agent of a
server, or the other way round.`,
		Example: `  dunlin install server
  dunlin install agent --join LINE`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{"server", "agent"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkJoin(args[0], join); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("installing a system service needs root: run it with sudo")
			}
			if a.configWins {
				return usagef("--config-dir: the service has its folders from /etc/dunlin/config.yaml alone: write config-dir there")
			}
			p, err := servicePaths(install.Paths{})
			if err != nil {
				return err
			}
			if err := checkInstall(p, args[0], join, force); err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find own binary: %w", err)
			}
			did, err := install.Install(install.Options{Role: args[0], JoinLine: join, Self: self, Paths: p})
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
	c.Flags().BoolVar(&force, "force", false, "install in place of the other role")
	c.Flags().BoolVar(&noStart, "no-start", false, "do not enable and start the unit")
	return c
}

// checkJoin judges a join line before anything is touched.
func checkJoin(role, join string) error {
	if join == "" {
		return nil
	}
	if role == "server" {
		return usagef("--join is for agents; a further server joins once with 'dunlin server --join LINE', and is installed without a line after that")
	}
	if _, err := pki.ParseJoinLine(join); err != nil {
		return usagef("--join: %w", err)
	}
	return nil
}

// servicePaths adds the folders that the configuration file names: from there
// alone the service has its flags.
func servicePaths(p install.Paths) (install.Paths, error) {
	values, err := readConfig(p.ConfigFile(), false)
	if err != nil {
		return p, err
	}
	for flag, to := range map[string]*string{"state-dir": &p.StateDir, "run-dir": &p.RunDir, "config-dir": &p.ConfigDir} {
		v, ok := values[flag]
		if ok && !filepath.IsAbs(v) {
			return p, usagef("%s: %s: %s: the whole path of a folder is wanted", p.ConfigFile(), flag, v)
		}
		*to = v
	}
	return p, nil
}

// checkInstall says what keeps a role from being installed on this host.
func checkInstall(p install.Paths, role, join string, force bool) error {
	if had := install.Role(p); had != "" && had != role && !force {
		return fmt.Errorf("this machine has the service of a dunlin %s (%s); 'dunlin uninstall --keep-state' first, or --force puts the %s in its place", had, p.Unit(), role)
	}
	if role != "agent" || join != "" || joinedAlready(nodeOptions{dirs: dirs{state: p.State()}}) || fileThere(filepath.Join(p.Config(), "join")) {
		return nil
	}
	return usagef("this node has not joined a cluster yet: run 'dunlin token create' on a server, and here 'dunlin install agent --join LINE'")
}

func fileThere(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
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
	var o nodeOptions
	var yes, keep bool
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Stop all workloads of this machine and remove Dunlin, its state included",
		Long: `Stop all workloads of this machine and remove Dunlin, its state included.

Folders and names are those of the configuration file, as for the service. Of a
folder that it names only what Dunlin made is removed, and the folder if nothing
else is in it. A folder that is a mount point is emptied and stays. The
configuration file goes last.

With the --state-dir of a server or agent that was started by hand, that one is
removed, and the machine's service with its programs and its state stays.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return rootless(o.dirs)
			}
			if err := o.placeWhole(); err != nil {
				return err
			}
			return a.uninstall(cmd.Context(), install.Paths{StateDir: o.state, RunDir: o.run, ConfigDir: o.config}, o, keep, yes)
		},
	}
	o.addPlace(c)
	c.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&keep, "keep-state", false, "keep the state and the configuration")
	return c
}

// rootless says to an ordinary user what to do instead: nothing was installed
// for a server that was started without root, but its guests outlive it.
func rootless(d dirs) error {
	return fmt.Errorf("uninstalling needs root: run it with sudo; of a server that you started without root, stop it, end its guests with 'dunlin server sweep', and remove %s, %s and %s", d.state, d.run, d.config)
}

// placeWhole is place for folders that are removed: where the command was
// called must not decide which.
func (o *nodeOptions) placeWhole() error {
	for _, d := range []struct{ flag, dir string }{{"state", o.state}, {"run", o.run}, {"config", o.config}} {
		if !filepath.IsAbs(d.dir) {
			return usagef("--%s-dir=%s: the whole path of a folder is wanted", d.flag, d.dir)
		}
	}
	return o.place()
}

// beside says whose paths these are: the service's, or, where the state is in
// another folder than its, those of something that was started by hand.
func beside(p install.Paths) (install.Paths, error) {
	service, err := servicePaths(install.Paths{Root: p.Root})
	if err == nil && service.State() != p.State() {
		p.Service = &service
	}
	return p, err
}

func (a *app) uninstall(ctx context.Context, p install.Paths, o nodeOptions, keep, yes bool) error {
	p, err := beside(p)
	if err != nil {
		return err
	}
	if !install.Present(p, keep) {
		a.printf("Nothing of Dunlin is installed here.\n")
		return nil
	}
	if p.Service != nil || !unitRuns(ctx) { // else it is stopped below
		if err := checkIdle(p); err != nil {
			return err
		}
	}
	ask := "Stop all workloads of this machine and remove Dunlin with its state (%s)?"
	if p.Service != nil {
		ask = "Stop the workloads of this node, which is not the machine's service, and remove its state (%s)?"
	}
	if !yes && !a.confirm(fmt.Sprintf(ask, strings.Join(p.States(), ", "))) {
		return errors.New("nothing was changed")
	}
	if p.Service != nil {
		return a.takeAway(ctx, p, o, keep)
	}
	if err := a.systemctl(ctx, false); err != nil {
		return err
	}
	if err := a.takeAway(ctx, p, o, keep); err != nil {
		return err
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		_ = exec.CommandContext(ctx, "systemctl", "daemon-reload").Run()
	}
	return nil
}

// takeAway stops the workloads and removes the files; nothing while something
// of Dunlin's runs.
func (a *app) takeAway(ctx context.Context, p install.Paths, o nodeOptions, keep bool) error {
	if err := checkIdle(p); err != nil {
		return err
	}
	if err := sweepMachine(ctx, o); err != nil {
		return err
	}
	if dir, err := wasm.ForegroundDir(); err == nil && !keep && p.Service == nil && fileThere(dir) {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove: %w", err)
		}
		a.printf("removed  %s (compiled code of 'dunlin run'; other users have their own)\n", dir)
	}
	plugged, _ := filepath.Glob(filepath.Join(p.Config(), "cni", "*.conf*")) // the pattern is a good one
	did, err := install.Remove(p, keep)
	for _, s := range did {
		a.printf("%s\n", s)
	}
	if len(plugged) > 0 {
		a.notef("What CNI plugins keep for all pods stays (bridges, the chains of portmap): '%s' named them; 'ip link del BRIDGE' and a reboot take it away.\n", plugged[0])
	}
	if s := p.Service; s != nil && install.Present(*s, false) {
		a.notef("The service of this machine (%s) stays: 'dunlin uninstall' without flags takes it away.\n", s.State())
	}
	return err
}

// unitRuns says whether systemd runs the installed unit.
func unitRuns(ctx context.Context) bool {
	return exec.CommandContext(ctx, "systemctl", "is-active", "--quiet", install.UnitName).Run() == nil
}

// checkIdle refuses while a server or an agent has the state open: it would
// lose its files below its feet, and start its workloads again.
func checkIdle(p install.Paths) error {
	for _, state := range p.States() {
		for _, f := range []struct{ who, path string }{
			{"server", filepath.Join(state, "server", "raft", "lock")},
			{"agent", filepath.Join(state, "node", "node.db")},
		} {
			by, err := lockedBy(f.path)
			if err != nil {
				return err
			}
			if by != "" {
				return fmt.Errorf("a dunlin %s is running with %s: %s; stop it first, nothing was changed", f.who, state, by)
			}
		}
	}
	return nil
}

// lockedBy names the process that holds a file's lock; "" is none.
func lockedBy(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("is it running: %w", err)
	}
	defer func() { _ = f.Close() }() // gives back the lock
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
		return "", err
	}
	var st unix.Stat_t
	locks, lerr := os.ReadFile("/proc/locks")
	if err := errors.Join(lerr, unix.Fstat(int(f.Fd()), &st)); err != nil {
		return "another process", nil //nolint:nilerr // held all the same
	}
	return lockHolder(string(locks), st.Ino), nil
}

// lockHolder finds who holds an inode's lock in the text of /proc/locks
// (proc_locks(5)): "1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF".
func lockHolder(locks string, inode uint64) string {
	for line := range strings.Lines(locks) {
		f := strings.Fields(line)
		if len(f) > 5 && f[1] == "FLOCK" && strings.HasSuffix(f[5], fmt.Sprintf(":%d", inode)) && f[4] != "0" && f[4] != "-1" {
			return "process " + f[4]
		}
	}
	return "another process"
}

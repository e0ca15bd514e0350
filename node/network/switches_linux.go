package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// Forwarding is a switch of the whole network namespace, which the kernel
// follows by others of its own (ip-sysctl: ip_forward "resets all configuration
// parameters to their default state"). What they were is written down before
// they are touched, and put back once nobody needs it. All agents of a network
// namespace share the one record, for the last to put back what the first
// found.

// switches is the record's folder; "" keeps none.
type switches struct{ dir string }

// switched is what was switched since the boot.
type switched struct {
	Boot   string  `json:"boot"`
	Values []value `json:"values"`
	// Links are switches of single links of the machine, for IPv4.
	Links []value `json:"links,omitempty"`
}

// value is a file below /proc/sys/net.
type value struct {
	Name string `json:"name"`
	Old  string `json:"old"`
	Set  string `json:"set"` // by us, or by the kernel with what we set
}

const (
	forward4 = "ipv4/ip_forward"
	forward6 = "ipv6/conf/all/forwarding"
)

// RememberIn names the folder, of this boot and shared by all agents of the
// machine, in which what is switched for the machine as a whole is kept.
func (n *Namespaced) RememberIn(dir string) { n.switches.dir = dir }

func sysctl(name string) string { return filepath.Join("/proc/sys/net", name) }

func get(name string) (string, error) {
	b, err := os.ReadFile(sysctl(name))
	return strings.TrimSpace(string(b)), err
}

func set(name, value string) error { return os.WriteFile(sysctl(name), []byte(value), 0) }

// switchOn writes 1 to a file below /proc/sys/net unless it says so already.
func switchOn(name string) error {
	if v, err := get(name); err == nil && v == "1" {
		return nil
	}
	return set(name, "1")
}

// lock keeps others from the record, until unlock.
func (s switches) lock() (unlock func(), err error) {
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return nil, err
	}
	f, err := os.Open(s.dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// path of the record of this network namespace, and the boot it must be of:
// values do not outlive it.
func (s switches) path() (path, boot string, err error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return "", "", err
	}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return filepath.Join(s.dir, fmt.Sprintf("switched-%d.json", st.Ino)), strings.TrimSpace(string(b)), err
}

// read returns the record; none, a damaged one and one of another boot are
// empty.
func (s switches) read() (r switched, path string, err error) {
	path, boot, err := s.path()
	if err != nil {
		return r, "", err
	}
	b, err := atomicfile.Read(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt) {
		return r, path, err
	}
	if err != nil || json.Unmarshal(b, &r) != nil || r.Boot != boot {
		r = switched{Boot: boot}
	}
	return r, path, nil
}

// on switches a master on, after it set the values of before, which must not
// follow. What they and those that follow the master are is in the record
// first.
func (s switches) on(master string, before, follow []value) error {
	if v, err := get(master); err == nil && v == "1" {
		return nil
	}
	all := append(append([]value{{Name: master, Set: "1"}}, before...), follow...)
	if s.dir != "" {
		unlock, err := s.lock()
		if err != nil {
			return err
		}
		defer unlock()
		if err := s.write(all); err != nil {
			return err
		}
	}
	for _, v := range before {
		if err := set(v.Name, v.Set); err != nil {
			return err
		}
	}
	return set(master, "1")
}

// write takes the values of one family, as they are now, into the record; what
// it knew of them is from before somebody else switched them off.
func (s switches) write(all []value) error {
	r, path, err := s.read()
	if err != nil {
		return err
	}
	family, _, _ := strings.Cut(all[0].Name, "/")
	r.Values = slices.DeleteFunc(r.Values, func(v value) bool { return strings.HasPrefix(v.Name, family+"/") })
	for _, v := range all {
		// Also of a link that forwards already: it shall go on when the master
		// takes all others back with it.
		var err error
		if v.Old, err = get(v.Name); err == nil {
			r.Values = append(r.Values, v)
		}
	}
	return r.save(path)
}

func (r switched) save(path string) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, b, 0o600)
}

// link lets the machine forward what comes in by one link, which is the
// machine's or ours.
func (s switches) link(link string, ours bool) error {
	name := "ipv4/conf/" + link + "/forwarding"
	if ours || s.dir == "" {
		return switchOn(name)
	}
	old, err := get(name)
	if err != nil || old == "1" {
		return err
	}
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	r, path, err := s.read()
	if err != nil {
		return err
	}
	r.Links = append(slices.DeleteFunc(r.Links, func(v value) bool { return v.Name == name }), value{Name: name, Old: old, Set: "1"})
	if err := r.save(path); err != nil {
		return err
	}
	return set(name, "1")
}

// forwardings are the switches of single links that follow a family's.
func forwardings(family string) (out []value) {
	files, _ := filepath.Glob(sysctl(family + "/conf/*/forwarding"))
	for _, f := range files {
		if link := filepath.Base(filepath.Dir(f)); link != "all" && !strings.HasPrefix(link, vethPrefix) {
			out = append(out, value{Name: family + "/conf/" + link + "/forwarding", Set: "1"})
		}
	}
	return out
}

// ipv4 lets the machine forward, and so pods reach what is outside.
func (s switches) ipv4() error {
	return s.on(forward4, nil, append(forwardings("ipv4"), value{Name: "ipv4/conf/all/accept_redirects", Set: "0"}))
}

// ipv6 is the same for IPv6. A machine that forwards hears no router
// advertisements any more, unless it is told to (accept_ra 2): it would lose
// its own default route.
func (s switches) ipv6() error {
	if _, err := get(forward6); err != nil {
		return nil //nolint:nilerr // a kernel without IPv6 has no such pods
	}
	var hear []value
	files, _ := filepath.Glob(sysctl("ipv6/conf/*/accept_ra"))
	for _, f := range files {
		name := "ipv6/conf/" + filepath.Base(filepath.Dir(f)) + "/accept_ra"
		if v, err := get(name); err == nil && v == "1" {
			hear = append(hear, value{Name: name, Set: "2"})
		}
	}
	return s.on(forward6, hear, forwardings("ipv6"))
}

// Restore puts back what agents of this network namespace switched on for the
// machine as a whole, as far as it still is what they set: once no pod of
// another agent is left that needs it, nor another agent (busy).
func Restore(dir string, busy func() bool) error {
	s := switches{dir}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := s.lock()
	if err != nil {
		return fmt.Errorf("switch forwarding off: %w", err)
	}
	defer unlock()
	r, path, err := s.read()
	if err != nil {
		return fmt.Errorf("switch forwarding off: %w", err)
	}
	if used, err := needed(); err != nil || used || busy() {
		return err
	}
	if err := errors.Join(r.restore("ipv4", forward4), r.restore("ipv6", forward6), r.restoreLinks()); err != nil {
		return fmt.Errorf("switch forwarding off: %w", err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("switch forwarding off: %w", err)
	}
	return nil
}

// needed says whether a pod is left that has a link of its own.
func needed() (bool, error) {
	links, err := listed(netlink.LinkList)
	if err != nil {
		return false, fmt.Errorf("list links: %w", err)
	}
	return slices.ContainsFunc(links, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, vethPrefix) }), nil
}

// restore puts back the values of a family whose master is still as it was
// set. What followed the master follows it back, and is then put right.
func (r switched) restore(family, master string) error {
	var mine []value
	for _, v := range r.Values {
		if now, err := get(v.Name); err == nil && now == v.Set && strings.HasPrefix(v.Name, family+"/") {
			mine = append(mine, v)
		}
	}
	if len(mine) == 0 || mine[0].Name != master {
		return nil // somebody else decided
	}
	var errs []error
	for _, v := range mine {
		if now, err := get(v.Name); err == nil && now != v.Old {
			errs = append(errs, set(v.Name, v.Old))
		}
	}
	return errors.Join(errs...)
}

// restoreLinks does so for single links, unless somebody made the whole
// machine forward.
func (r switched) restoreLinks() error {
	if now, err := get(forward4); err != nil || now != "0" {
		return nil //nolint:nilerr // nothing to put right then
	}
	var errs []error
	for _, v := range r.Links {
		if now, err := get(v.Name); err == nil && now == v.Set {
			errs = append(errs, set(v.Name, v.Old))
		}
	}
	return errors.Join(errs...)
}

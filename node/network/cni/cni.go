// Package cni speaks the protocol of the Container Network Interface
// (specification 0.3 to 1.1, github.com/containernetworking/cni/blob/main/SPEC.md)
// with the plugins that an operator installed: it reads the configuration,
// runs each plugin with JSON on standard input, and keeps what was attached,
// so that it can be checked and taken away by the plugins that made it,
// whatever the configuration says by then.
//
// Owner: the node's network, from the goroutines of pods; calls for one pod
// come one after the other. Nothing here runs in the background.
package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// DefaultBinDirs are where distributions and upstream put plugins.
const DefaultBinDirs = "/opt/cni/bin:/usr/lib/cni"

// ifname is the pod's interface.
const ifname = "eth0"

// timeout of one plugin. IPv6's duplicate address detection takes seconds.
const timeout = 90 * time.Second

// Config of Networks.
type Config struct {
	ConfDir  string   // where the operator drops *.conflist
	BinDirs  []string // where plugins are looked up, in this order
	StateDir string   // what is attached; must survive a reboot
	Logger   *slog.Logger
}

// Networks attaches pods to the network of the operator's configuration.
type Networks struct{ c Config }

// New makes Networks; nothing is read or run yet.
func New(c Config) *Networks {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return &Networks{c}
}

// PortMapping is a host port, in the words of the convention for the
// capability portMappings.
type PortMapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"` // tcp, udp
	HostIP        string `json:"hostIP,omitempty"`
}

// Address is one from the node's own range, for plugins that take it.
type Address struct {
	Prefix  netip.Prefix // the address, and the range that it is of
	Gateway netip.Addr
}

// Attachment is what a pod asks for.
type Attachment struct {
	ID             string // of the pod for the plugins; carries the node's mark
	NetNS          string
	Namespace, Pod string
	Ports          []PortMapping
	Addresses      []Address
	BinDirs        []string // where Add found its plugins; set by it
}

// List is one configuration: plugins that are run one after the other.
type List struct {
	File    string            `json:"-"`
	Version string            `json:"cniVersion"`
	Name    string            `json:"name"`
	NoCheck bool              `json:"disableCheck,omitempty"`
	Plugins []json.RawMessage `json:"plugins"`
}

// TakesPorts says whether host ports are the plugins' work.
func (l *List) TakesPorts() bool {
	return l.any(func(p *plugin) bool { return p.Capabilities["portMappings"] })
}

// TakesAddresses says whether the address is ours to give.
func (l *List) TakesAddresses() bool {
	return l.any(func(p *plugin) bool { return p.static() || p.Capabilities["ips"] })
}

func (l *List) any(is func(*plugin) bool) bool {
	return slices.ContainsFunc(l.Plugins, func(raw json.RawMessage) bool {
		var p plugin
		return json.Unmarshal(raw, &p) == nil && is(&p)
	})
}

// plugin is what we read of one.
type plugin struct {
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         struct {
		Type      string            `json:"type"`
		Addresses []json.RawMessage `json:"addresses"`
	} `json:"ipam"`
}

// static says that the plugin static gives the address, and is told it by us:
// in CNI_ARGS, since it takes a gateway only there.
func (p *plugin) static() bool { return p.IPAM.Type == "static" && len(p.IPAM.Addresses) == 0 }

// Load reads the first configuration by name, as other runtimes do; nil when
// there is none.
func (n *Networks) Load() (*List, error) {
	entries, err := os.ReadDir(n.c.ConfDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("CNI configuration: %w", err)
	}
	for _, e := range entries { // sorted by name
		p := filepath.Join(n.c.ConfDir, e.Name())
		switch filepath.Ext(e.Name()) {
		case ".conflist", ".conf", ".json":
			l, err := read(p)
			if err != nil {
				return nil, fmt.Errorf("CNI configuration %s: %w", p, err)
			}
			return l, nil
		}
	}
	return nil, nil
}

func read(p string) (*List, error) {
	b, err := os.ReadFile(p)
	if err != nil {
		return nil, err
	}
	l := &List{File: p}
	if err := json.Unmarshal(b, l); err != nil {
		return nil, fmt.Errorf("it is not JSON of the form {cniVersion, name, plugins}: %w", err)
	}
	if l.Plugins == nil {
		// A single plugin, as before there were lists.
		l.Plugins = []json.RawMessage{b}
	}
	switch {
	case l.Name == "":
		return nil, errors.New("it has no name")
	case !slices.Contains([]string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}, l.Version):
		return nil, fmt.Errorf("cniVersion %q is not one of 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0", l.Version)
	case len(l.Plugins) == 0:
		return nil, errors.New("it names no plugin")
	}
	for i, raw := range l.Plugins {
		var c plugin
		if err := json.Unmarshal(raw, &c); err != nil {
			return nil, fmt.Errorf("plugins[%d]: %w", i, err)
		}
		if c.Type == "" || filepath.Base(c.Type) != c.Type {
			return nil, fmt.Errorf("plugins[%d]: type %q is not the name of a program", i, c.Type)
		}
	}
	return l, nil
}

// Result is what a plugin answers, as far as we read it.
type Result struct {
	IPs []struct {
		Address netip.Prefix `json:"address"`
	} `json:"ips"`
}

// attached is the record of one: with what, and what came of it.
type attached struct {
	List       List            `json:"list"`
	Attachment Attachment      `json:"attachment"`
	Result     json.RawMessage `json:"result,omitempty"` // missing: ADD was begun
	// Failed is the plugin, counted from 1, whose ADD failed: those from it on
	// may be unable to take away what they never made.
	Failed int `json:"failed,omitempty"`
}

func (n *Networks) record(id string) string { return filepath.Join(n.c.StateDir, id+".json") }

func (n *Networks) load(id string) (*attached, error) {
	b, err := atomicfile.Read(n.record(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var a attached
	if err == nil {
		err = json.Unmarshal(b, &a)
	}
	if err != nil {
		// What it held cannot be taken away by us any more.
		n.c.Logger.Warn("record of a CNI attachment is damaged and set aside", "id", id, "err", err)
		_, err = atomicfile.Quarantine(n.record(id))
		return nil, err
	}
	return &a, nil
}

func (n *Networks) save(a *attached) error {
	if err := os.MkdirAll(n.c.StateDir, 0o700); err != nil {
		return fmt.Errorf("CNI attachment: %w", err)
	}
	b, err := json.Marshal(a)
	if err != nil {
		return fmt.Errorf("CNI attachment: %w", err)
	}
	return atomicfile.Write(n.record(a.Attachment.ID), b, 0o600)
}

// Has says whether the pod is attached, or was about to be.
func (n *Networks) Has(id string) bool {
	_, err := os.Stat(n.record(id))
	return err == nil
}

// IDs of all that is attached.
func (n *Networks) IDs() []string {
	names, _ := filepath.Glob(n.record("*"))
	for i := range names {
		names[i] = strings.TrimSuffix(filepath.Base(names[i]), ".json")
	}
	return names
}

// Add attaches a pod and returns its addresses. The record is written before
// the first plugin runs: what a killed agent leaves behind is taken away.
func (n *Networks) Add(ctx context.Context, l *List, at Attachment) ([]netip.Addr, error) {
	at.BinDirs = n.c.BinDirs
	for _, raw := range l.Plugins {
		var p plugin
		if err := json.Unmarshal(raw, &p); err != nil {
			return nil, fmt.Errorf("CNI plugin: %w", err)
		}
		if _, err := n.find(p.Type, at.BinDirs); err != nil {
			return nil, err // what nothing was done for needs nothing undone
		}
	}
	a := &attached{List: *l, Attachment: at}
	if err := n.save(a); err != nil {
		return nil, err
	}
	var result json.RawMessage
	for i, raw := range l.Plugins {
		out, err := n.run(ctx, "ADD", l, raw, at, result)
		if err != nil {
			a.Failed = i + 1
			return nil, errors.Join(err, n.save(a), n.Del(context.WithoutCancel(ctx), at.ID))
		}
		result = out
	}
	ips, err := addresses(result)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("CNI configuration %s: %w", l.File, err), n.Del(context.WithoutCancel(ctx), at.ID))
	}
	a.Result = result
	return ips, n.save(a)
}

func addresses(result json.RawMessage) ([]netip.Addr, error) {
	var r Result
	if err := json.Unmarshal(result, &r); err != nil {
		return nil, fmt.Errorf("its plugins answer no result: %w", err)
	}
	var ips []netip.Addr
	for _, ip := range r.IPs {
		ips = append(ips, ip.Address.Addr())
	}
	if len(ips) == 0 {
		return nil, errors.New("its plugins gave the pod no address")
	}
	return ips, nil
}

// Attached returns the addresses of a pod that is attached to this namespace,
// nil when it is not, or not wholly. What the plugins find wrong with it is
// logged: taking a running pod's network away would not make it better.
func (n *Networks) Attached(ctx context.Context, id, netns string) ([]netip.Addr, error) {
	a, err := n.load(id)
	if err != nil || a == nil || a.Result == nil || a.Attachment.NetNS != netns {
		return nil, err
	}
	if !a.List.NoCheck && a.List.Version >= "0.4.0" {
		for _, raw := range a.List.Plugins {
			if _, err := n.run(ctx, "CHECK", &a.List, raw, a.Attachment, a.Result); err != nil {
				n.c.Logger.Warn("the network of a pod is not as its plugins left it", "id", id, "pod", a.Attachment.Namespace+"/"+a.Attachment.Pod, "err", err)
				break
			}
		}
	}
	return addresses(a.Result)
}

// Del takes a pod's attachment away, with the configuration that made it. It
// goes through all plugins, and is done again until each succeeded.
func (n *Networks) Del(ctx context.Context, id string) error {
	a, err := n.load(id)
	if err != nil || a == nil {
		return err
	}
	var errs []error
	for i, raw := range slices.Backward(a.List.Plugins) {
		result := a.Result
		if a.List.Version < "0.4.0" {
			result = nil // came with 0.4
		}
		_, err := n.run(ctx, "DEL", &a.List, raw, a.Attachment, result)
		switch {
		case err == nil:
		case a.Failed > 0 && i+1 >= a.Failed:
			n.c.Logger.Warn("a CNI plugin that had failed does not take back what it may have done", "id", id, "err", err)
		default:
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(n.record(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("CNI attachment: %w", err)
	}
	return nil
}

package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/dunlin-project/dunlin/node/network/cni"
)

// UseCNI has pods of containers attached by plugins while there is a
// configuration for them. Plugins are run without n's lock.
func (n *Namespaced) UseCNI(plugins *cni.Networks) { n.plugins = plugins }

// configured is the list that a pod is, or is to be, attached by; nil is our
// own network. A pod that is there keeps what it has.
func (n *Namespaced) configured(uid string) (*cni.List, error) {
	if n.plugins == nil {
		return nil, nil
	}
	if l, err := netlink.LinkByName(n.podVeth(uid)); err == nil && l.Attrs().Alias == n.alias(uid) {
		return nil, nil // by us, before the configuration came
	}
	list, err := n.plugins.Load()
	if list == nil && err == nil && n.plugins.Has(n.podNamespace(uid)) {
		list = &cni.List{} // the configuration went; its pods are still there
	}
	return list, err
}

// attach sets up a pod by the operator's plugins, or finds it as it was.
func (n *Namespaced) attach(ctx context.Context, list *cni.List, pod Pod, previous *Allocation) (Allocation, error) {
	id := n.podNamespace(pod.UID)
	a := Allocation{Namespace: filepath.Join("/run/netns", id)}
	made, err := n.openAttached(id)
	if err != nil {
		return Allocation{}, err
	}
	if made && n.plugins.Has(id) {
		// The machine was rebooted: its plugins may hold what they gave.
		if err := n.plugins.Del(ctx, id); err != nil {
			return Allocation{}, err
		}
	}
	if a.IPs, err = n.plugins.Attached(ctx, id, a.Namespace); err != nil {
		return Allocation{}, err
	}
	if a.IPs == nil {
		if err := n.plugins.Del(ctx, id); err != nil { // half done
			return Allocation{}, err
		}
		if len(list.Plugins) == 0 {
			return Allocation{}, errors.New("the pod was attached by CNI plugins, and their configuration is gone")
		}
		if err := n.free(pod.UID, pod.Ports, true, n.hasIPv6()); err != nil { // whoever makes the rules
			if made && previous == nil {
				err = errors.Join(err, netns.DeleteNamed(id)) // nobody is told of it
			}
			return Allocation{}, err
		}
		at := cni.Attachment{ID: id, NetNS: a.Namespace, Namespace: pod.Namespace, Pod: pod.Name}
		for _, p := range pod.Ports {
			m := cni.PortMapping{HostPort: p.Host, ContainerPort: p.Container, Protocol: strings.ToLower(p.Protocol)}
			if p.IP.IsValid() {
				m.HostIP = p.IP.String()
			}
			at.Ports = append(at.Ports, m)
		}
		if list.TakesAddresses() {
			if at.Addresses, err = n.addressesFor(pod.UID, previous); err != nil {
				return Allocation{}, err
			}
		}
		if a.IPs, err = n.plugins.Add(ctx, list, at); err != nil {
			return Allocation{}, err
		}
	} else if err := n.claim(pod.UID, a.IPs); err != nil {
		return Allocation{}, err
	}
	a.IP = a.IPs[0]
	if list.TakesPorts() {
		return a, nil
	}
	return a, n.publishAttached(pod, a.IPs)
}

// openAttached makes sure that the pod's namespace is there, with a loopback
// that is up; made says that it was not.
func (n *Namespaced) openAttached(name string) (made bool, err error) {
	made = within(filepath.Join("/run/netns", name), func() error { return nil }) != nil
	ns, inside, err := ensureNamed(name)
	if err != nil {
		return made, fmt.Errorf("set up pod namespace: %w", err)
	}
	defer func() { _ = ns.Close() }()
	defer inside.Close()
	lo, err := inside.LinkByName("lo")
	if err == nil {
		err = inside.LinkSetUp(lo)
	}
	if err != nil {
		return made, fmt.Errorf("set up pod namespace: bring up lo: %w", err)
	}
	return made, nil
}

// addressesFor gives the pod addresses of the node's ranges.
func (n *Namespaced) addressesFor(uid string, previous *Allocation) (out []cni.Address, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a, err := n.allocate(uid, previous)
	if err != nil {
		return nil, err
	}
	for i, ip := range a.IPs {
		r := n.ranges[i]
		out = append(out, cni.Address{Prefix: netip.PrefixFrom(ip, r.prefix.Bits()), Gateway: r.gateway()})
	}
	return out, nil
}

// claim keeps addresses of our ranges for the pod that has them.
func (n *Namespaced) claim(uid string, ips []netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, ip := range ips {
		for _, r := range n.ranges {
			if r.prefix.Contains(ip) && !r.claim(ip, uid) {
				return fmt.Errorf("address %s of the pod has another owner", ip)
			}
		}
	}
	return nil
}

// publishAttached makes the rules of host ports that no plugin makes.
func (n *Namespaced) publishAttached(pod Pod, ips []netip.Addr) error {
	if len(pod.Ports) == 0 {
		return nil
	}
	link := ""
	for _, ip := range ips {
		routes, err := netlink.RouteGet(ip.AsSlice())
		if err != nil || len(routes) == 0 {
			return fmt.Errorf("host ports: the host has no way to %s: %w", ip, err)
		}
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		if err != nil {
			return fmt.Errorf("host ports: the way to %s: %w", ip, err)
		}
		if ip.Is4() {
			link = l.Attrs().Name
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.publish(pod.UID, ips, pod.Ports, link)
}

// retakeAttached takes what an earlier agent had attached.
func (n *Namespaced) retakeAttached(ctx context.Context, uid string, previous Allocation) error {
	id := n.podNamespace(uid)
	ips, err := n.plugins.Attached(ctx, id, previous.Namespace)
	if err != nil {
		return err
	}
	return n.claim(uid, ips)
}

// detach has the plugins take the pod away, while its namespace is there.
func (n *Namespaced) detach(ctx context.Context, uid string) error {
	if n.plugins == nil {
		return nil
	}
	return n.plugins.Del(ctx, n.podNamespace(uid))
}

// detachAll is for uninstall.
func (n *Namespaced) detachAll() error {
	if n.plugins == nil {
		return nil
	}
	var errs []error
	for _, id := range n.plugins.IDs() {
		if strings.HasPrefix(id, n.name+"-") {
			errs = append(errs, n.plugins.Del(context.Background(), id))
		}
	}
	return errors.Join(errs...)
}

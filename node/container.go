package node

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// seccompDir is where profiles of type Localhost are looked up, as in the
// kubelet's folder.
func (a *Agent) seccompDir() string { return filepath.Join(a.c.StateDir, "seccomp") }

// seLinuxOn says whether the kernel enforces or logs by SELinux labels.
func seLinuxOn() bool {
	_, err := os.Stat("/sys/fs/selinux/enforce")
	return err == nil
}

// seLinux refuses labels where they would have an effect: we set none, so the
// container would be less isolated than its author believes. Elsewhere they
// mean nothing, as with upstream.
func seLinux(pod *corev1.Pod, c *corev1.Container, on bool) error {
	if !on {
		return nil
	}
	if (pod.Spec.SecurityContext != nil && pod.Spec.SecurityContext.SELinuxOptions != nil) ||
		(c.SecurityContext != nil && c.SecurityContext.SELinuxOptions != nil) {
		return errors.New("seLinuxOptions: this node has SELinux on, and Dunlin sets no labels; take them out, or place the pod on a node without SELinux")
	}
	return nil
}

// security is what a container may do: its own context before the pod's.
func security(pod *corev1.Pod, c *corev1.Container, profiles string) workload.Security {
	var s workload.Security
	profile := (*corev1.SeccompProfile)(nil)
	if p := pod.Spec.SecurityContext; p != nil {
		profile = p.SeccompProfile
		s.RunAsNonRoot = p.RunAsNonRoot != nil && *p.RunAsNonRoot
		s.StrictGroups = p.SupplementalGroupsPolicy != nil && *p.SupplementalGroupsPolicy == corev1.SupplementalGroupsPolicyStrict
		for _, ctl := range p.Sysctls {
			if s.Sysctls == nil {
				s.Sysctls = map[string]string{}
			}
			s.Sysctls[ctl.Name] = ctl.Value
		}
	}
	if sc := c.SecurityContext; sc != nil {
		profile = cmp.Or(sc.SeccompProfile, profile)
		s.Privileged = sc.Privileged != nil && *sc.Privileged
		s.NoNewPrivileges = sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation
		s.ProcUnmasked = sc.ProcMount != nil && *sc.ProcMount == corev1.UnmaskedProcMount
		if sc.RunAsNonRoot != nil {
			s.RunAsNonRoot = *sc.RunAsNonRoot
		}
		if sc.Capabilities != nil {
			for _, n := range sc.Capabilities.Add {
				s.AddCapabilities = append(s.AddCapabilities, string(n))
			}
			for _, n := range sc.Capabilities.Drop {
				s.DropCapabilities = append(s.DropCapabilities, string(n))
			}
		}
	}
	if profile != nil {
		switch profile.Type {
		case corev1.SeccompProfileTypeUnconfined:
			s.Seccomp = "Unconfined"
		case corev1.SeccompProfileTypeLocalhost:
			if profile.LocalhostProfile != nil {
				s.Seccomp = filepath.Join(profiles, filepath.Clean("/"+*profile.LocalhostProfile))
			}
		}
	}
	return s
}

// forContainer adds what only a container has: its own files in /etc, the
// signal that stops it, and its termination message.
func (a *Agent) forContainer(s *podState, c *ctrState, spec *workload.Spec) error {
	if l := c.spec.Lifecycle; l != nil && l.StopSignal != nil {
		spec.StopSignal = string(*l.StopSignal)
	}
	spec.TerminationPath = cmp.Or(c.spec.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	spec.TerminationFallback = c.spec.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError
	files, err := a.etcFiles(s)
	if err != nil {
		return err
	}
	for _, m := range files {
		if !slices.ContainsFunc(spec.Mounts, func(v workload.Mount) bool { return v.Target == m.Target }) {
			spec.Mounts = append(spec.Mounts, m)
		}
	}
	return nil
}

// etcFiles writes the pod's hosts, hostname and resolv.conf. They stand beside
// its logs, with which they are removed.
func (a *Agent) etcFiles(s *podState) ([]workload.Mount, error) {
	pod := s.pod
	dir := filepath.Join(a.podLogs(pod.Namespace, pod.Name, string(pod.UID)), ".etc")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("files of the pod: %w", err)
	}
	node, err := os.ReadFile("/etc/resolv.conf")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("resolv.conf of the node: %w", err)
	}
	var hosts []byte
	if pod.Spec.HostNetwork {
		if hosts, err = os.ReadFile("/etc/hosts"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("hosts file of the node: %w", err)
		}
	} else {
		hosts = hostsFile(pod, s.rec.IPs, a.c.ClusterDomain)
	}
	hosts = append(hosts, hostAliases(pod)...)
	out := []workload.Mount{}
	for name, text := range map[string][]byte{
		"hosts": hosts, "hostname": []byte(hostname(pod) + "\n"), "resolv.conf": resolvConf(pod, string(node), a.c.ClusterDNS(), a.c.ClusterDomain),
	} {
		p := filepath.Join(dir, name)
		// The same file, not a new one in its place: it is mounted.
		if old, err := os.ReadFile(p); err != nil || !bytes.Equal(old, text) {
			if err := os.WriteFile(p, text, 0o644); err != nil { // every user of the container reads it
				return nil, fmt.Errorf("files of the pod: %w", err)
			}
		}
		if name != "hostname" || !pod.Spec.HostNetwork {
			out = append(out, workload.Mount{Source: p, Target: "/etc/" + name})
		}
	}
	slices.SortFunc(out, func(x, y workload.Mount) int { return strings.Compare(x.Target, y.Target) })
	return out, nil
}

// hostsFile is upstream's, word for word what programs may look for. A pod with
// a subdomain finds its own name there also before the Service's DNS knows it.
func hostsFile(pod *corev1.Pod, ips []string, domain string) []byte {
	var b bytes.Buffer
	b.WriteString("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" +
		"fe00::\tip6-localnet\nfe00::\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	names := hostname(pod)
	if sub := pod.Spec.Subdomain; sub != "" {
		names = fmt.Sprintf("%s.%s.%s.svc.%s\t%s", names, sub, pod.Namespace, domain, names)
	}
	for _, ip := range ips {
		fmt.Fprintf(&b, "%s\t%s\n", ip, names)
	}
	return b.Bytes()
}

func hostAliases(pod *corev1.Pod) []byte {
	if len(pod.Spec.HostAliases) == 0 {
		return nil
	}
	var b bytes.Buffer
	b.WriteString("\n# Entries added by HostAliases.\n")
	for _, h := range pod.Spec.HostAliases {
		fmt.Fprintf(&b, "%s\t%s\n", h.IP, strings.Join(h.Hostnames, "\t"))
	}
	return b.Bytes()
}

// resolvConf follows dnsPolicy and dnsConfig. Without a cluster DNS server
// (dns nil) ClusterFirst is the node's own resolver.
func resolvConf(pod *corev1.Pod, node string, dns []netip.Addr, domain string) []byte {
	var servers, search, options []string
	read := func() {
		for line := range strings.Lines(node) {
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			switch f[0] {
			case "nameserver":
				servers = append(servers, f[1])
			case "search", "domain":
				search = f[1:]
			case "options":
				options = append(options, f[1:]...)
			}
		}
	}
	cluster := pod.Spec.DNSPolicy == corev1.DNSClusterFirstWithHostNet ||
		(pod.Spec.DNSPolicy == corev1.DNSClusterFirst || pod.Spec.DNSPolicy == "") && !pod.Spec.HostNetwork
	switch {
	case pod.Spec.DNSPolicy == corev1.DNSNone:
	case cluster && len(dns) > 0:
		read()
		servers, options = nil, []string{"ndots:5"}
		for _, ip := range dns {
			servers = append(servers, ip.String())
		}
		search = append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, search...)
	default:
		read()
	}
	if c := pod.Spec.DNSConfig; c != nil {
		servers, search = append(servers, c.Nameservers...), append(search, c.Searches...)
		for _, o := range c.Options {
			options = slices.DeleteFunc(options, func(x string) bool { n, _, _ := strings.Cut(x, ":"); return n == o.Name })
			text := o.Name
			if o.Value != nil {
				text += ":" + *o.Value
			}
			options = append(options, text)
		}
	}
	var b bytes.Buffer
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(search) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(unique(search), " "))
	}
	if len(options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(unique(options), " "))
	}
	return b.Bytes()
}

func unique(in []string) (out []string) {
	for _, s := range in {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// setupNetwork gives a pod of containers a namespace of its own.
func (a *Agent) setupNetwork(ctx context.Context, s *podState, rt workload.Runtime) (network.Allocation, error) {
	if rt.Name() == wasmHandler || s.pod.Spec.HostNetwork {
		return a.c.Network.Setup(ctx, s.rec.UID, s.pod.Spec.HostNetwork, s.rec.Allocation)
	}
	n, ok := a.c.Network.(network.Namespacer)
	if !ok {
		return network.Allocation{}, network.ErrNoNamespaces
	}
	return n.SetupNamespace(ctx, network.Pod{UID: s.rec.UID, Namespace: s.rec.Namespace, Name: s.rec.Name, Ports: hostPorts(s.pod)}, s.rec.Allocation)
}

func hostPorts(pod *corev1.Pod) (out []network.HostPort) {
	for i := range pod.Spec.Containers {
		for _, p := range pod.Spec.Containers[i].Ports {
			if p.HostPort != 0 {
				h := network.HostPort{Host: p.HostPort, Container: p.ContainerPort, Protocol: cmp.Or(string(p.Protocol), "TCP")}
				if ip, err := netip.ParseAddr(p.HostIP); err == nil && !ip.IsUnspecified() {
					h.IP = ip.Unmap()
				}
				out = append(out, h)
			}
		}
	}
	return out
}

// takeAgain gives a pod of an earlier agent its address again. The rules of
// its host ports are made once the pod's own set-up runs.
func (a *Agent) takeAgain(ctx context.Context, r *store.Pod) error {
	if r.Allocation.Namespace != "" {
		n, ok := a.c.Network.(network.Namespacer)
		if !ok {
			return network.ErrNoNamespaces
		}
		return n.Retake(ctx, r.UID, *r.Allocation)
	}
	_, err := a.c.Network.Setup(ctx, r.UID, r.Allocation.HostNetwork, r.Allocation)
	return err
}

package ingress

import (
	"crypto/tls"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// fault is what keeps requests from a backend.
type fault struct{ reason, message string }

func noClass(name string) []fault {
	if name == "" {
		return []fault{{"NoClass", "spec.ingressClassName is missing and no IngressClass is the default one: nobody serves this Ingress"}}
	}
	return []fault{{"UnknownClass", fmt.Sprintf("there is no IngressClass %q: nobody serves this Ingress", name)}}
}

// place is a backend, and where in the Ingress it stands.
type place struct {
	at      string
	backend *networkingv1.IngressBackend
}

func backends(i *networkingv1.Ingress) (out []place) {
	if b := i.Spec.DefaultBackend; b != nil {
		out = append(out, place{"spec.defaultBackend", b})
	}
	for r := range i.Spec.Rules {
		if h := i.Spec.Rules[r].HTTP; h != nil {
			for p := range h.Paths {
				out = append(out, place{fmt.Sprintf("spec.rules[%d].http.paths[%d].backend", r, p), &h.Paths[p].Backend})
			}
		}
	}
	return out
}

// faults lists everything that is wrong, each once.
func faults(ing *networkingv1.Ingress, c *controller) (out []fault) {
	for _, p := range backends(ing) {
		if f := backendFault(ing, p, c); f != nil {
			out = append(out, *f)
		}
	}
	for i := range ing.Spec.TLS {
		out = append(out, certificateFaults(ing, i, c)...)
	}
	var ours []*networkingv1.Ingress
	for _, o := range c.list() {
		if ingress.Ours(o, c.class) {
			ours = append(ours, o)
		}
	}
	return append(out, conflicts(ing, ours)...)
}

func backendFault(ing *networkingv1.Ingress, p place, c *controller) *fault {
	if p.backend.Service == nil {
		return &fault{"NotImplemented", p.at + ".resource: only Services are backends here; requests are answered with 503"}
	}
	want := p.backend.Service
	svc := get[*corev1.Service](c, serviceGK, ing.Namespace, want.Name)
	if svc == nil {
		return &fault{"NoSuchService", fmt.Sprintf("%s: there is no Service %s/%s; requests are answered with 503", p.at, ing.Namespace, want.Name)}
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return &fault{"NotImplemented", fmt.Sprintf("%s: Service %s/%s is of type ExternalName, which has no endpoints; requests are answered with 503", p.at, ing.Namespace, want.Name)}
	}
	var have []string
	for _, sp := range svc.Spec.Ports {
		if (want.Port.Name != "" && want.Port.Name == sp.Name) || (want.Port.Name == "" && want.Port.Number == sp.Port) {
			return nil
		}
		have = append(have, strings.TrimPrefix(fmt.Sprintf("%s/%d", sp.Name, sp.Port), "/"))
	}
	asked := want.Port.Name
	if asked == "" {
		asked = fmt.Sprint(want.Port.Number)
	}
	return &fault{"NoSuchPort", fmt.Sprintf("%s: Service %s/%s has no port %s, but %s; requests are answered with 503", p.at, ing.Namespace, want.Name, asked, strings.Join(have, ", "))}
}

// certificateFaults judges one entry of spec.tls.
func certificateFaults(ing *networkingv1.Ingress, i int, c *controller) (out []fault) {
	t := &ing.Spec.TLS[i]
	at := fmt.Sprintf("spec.tls[%d]", i)
	hosts := strings.Join(t.Hosts, ", ")
	if hosts == "" {
		hosts = "other hosts"
	}
	if t.SecretName == "" {
		return []fault{{"NoSecret", fmt.Sprintf("%s.secretName is missing: HTTPS for %s is refused", at, hosts)}}
	}
	sec := get[*corev1.Secret](c, secretGK, ing.Namespace, t.SecretName)
	if sec == nil {
		c.isGood(ing, t.SecretName, time.Time{})
		return []fault{{"NoSuchSecret", fmt.Sprintf("%s: there is no Secret %s/%s: HTTPS for %s is refused", at, ing.Namespace, t.SecretName, hosts)}}
	}
	for _, k := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
		if len(sec.Data[k]) == 0 {
			c.isGood(ing, t.SecretName, time.Time{})
			return []fault{{"BadCertificate", fmt.Sprintf("%s: Secret %s/%s has no %s: HTTPS for %s is refused", at, ing.Namespace, t.SecretName, k, hosts)}}
		}
	}
	pair, err := tls.X509KeyPair(sec.Data[corev1.TLSCertKey], sec.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		return []fault{{"BadCertificate", fmt.Sprintf("%s: Secret %s/%s: %s: %s", at, ing.Namespace, t.SecretName, strings.TrimPrefix(err.Error(), "tls: "), c.damaged(ing, t.SecretName, hosts))}}
	}
	c.isGood(ing, t.SecretName, pair.Leaf.NotAfter)
	for _, h := range t.Hosts {
		if pair.Leaf.VerifyHostname(strings.Replace(h, "*.", "any.", 1)) != nil {
			out = append(out, fault{"WrongHost", fmt.Sprintf("%s: the certificate in Secret %s/%s is not for %s, but for %s: clients will refuse it", at, ing.Namespace, t.SecretName, h, strings.Join(pair.Leaf.DNSNames, ", "))})
		}
	}
	trusted := c.env.Trust == nil || c.env.Trust() == nil
	if now := c.env.Clock.Now(); trusted && now.After(pair.Leaf.NotAfter) {
		out = append(out, fault{"Expired", fmt.Sprintf("%s: the certificate in Secret %s/%s ended on %s: clients will refuse it", at, ing.Namespace, t.SecretName, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))})
	}
	return out
}

// isGood remembers until when the certificate of a Secret is valid that nodes
// were given; the zero time is that they have none any more.
func (c *controller) isGood(ing *networkingv1.Ingress, secret string, until time.Time) {
	key := state.Key{Kind: ingress.Kind, Namespace: ing.Namespace, Name: ing.Name}
	c.mu.Lock()
	defer c.mu.Unlock()
	if until.IsZero() {
		delete(c.good[key], secret)
		return
	}
	if c.good[key] == nil {
		c.good[key] = map[string]time.Time{}
	}
	c.good[key][secret] = until
}

// damaged says what a certificate that cannot be read means: nodes go on with
// the one before it, where they had one.
func (c *controller) damaged(ing *networkingv1.Ingress, secret, hosts string) string {
	c.mu.Lock()
	until, ok := c.good[state.Key{Kind: ingress.Kind, Namespace: ing.Namespace, Name: ing.Name}][secret]
	c.mu.Unlock()
	date := until.UTC().Format(time.RFC3339)
	switch {
	case !ok:
		return fmt.Sprintf("HTTPS for %s is refused, but by nodes that were given a good certificate before: they go on with that one until they start anew", hosts)
	case c.env.Clock.Now().After(until):
		return fmt.Sprintf("nodes go on with the last good certificate for %s, which ended on %s: clients will refuse it", hosts, date)
	}
	return fmt.Sprintf("nodes go on with the last good certificate for %s, which is valid until %s; a node that starts anew has none", hosts, date)
}

// conflicts lists what an older Ingress has already. Pure.
func conflicts(ing *networkingv1.Ingress, all []*networkingv1.Ingress) (out []fault) {
	type claim struct {
		host, path string
		exact      bool
	}
	claims := func(i *networkingv1.Ingress) (list []claim) {
		for _, r := range ingress.Item(i).Rules {
			for _, p := range r.Paths {
				path := p.Path
				if !p.Exact && path != "/" {
					path = strings.TrimSuffix(path, "/")
				}
				list = append(list, claim{r.Host, path, p.Exact})
			}
		}
		if i.Spec.DefaultBackend != nil && len(i.Spec.Rules) == 0 {
			list = append(list, claim{})
		}
		return list
	}
	taken, certs := map[claim]*networkingv1.Ingress{}, map[string]*networkingv1.Ingress{}
	sorted := slices.Clone(all)
	slices.SortFunc(sorted, func(a, b *networkingv1.Ingress) int {
		if ingress.Older(a, b) {
			return -1
		}
		return 1
	})
	for _, o := range sorted {
		if o.UID == ing.UID {
			break
		}
		for _, k := range claims(o) {
			if taken[k] == nil {
				taken[k] = o
			}
		}
		for _, t := range o.Spec.TLS {
			for _, h := range t.Hosts {
				if certs[h] == nil {
					certs[h] = o
				}
			}
		}
	}
	said := map[string]bool{}
	add := func(format string, args ...any) {
		if text := fmt.Sprintf(format, args...); !said[text] {
			said[text] = true
			out = append(out, fault{"Conflict", text})
		}
	}
	for _, k := range claims(ing) {
		switch o := taken[k]; {
		case o == nil:
		case k.path == "":
			add("requests that no rule matches go to the older Ingress %s/%s, not to this one", o.Namespace, o.Name)
		default:
			add("host %q path %s is that of the older Ingress %s/%s: requests go there", k.host, k.path, o.Namespace, o.Name)
		}
	}
	for _, t := range ing.Spec.TLS {
		for _, h := range t.Hosts {
			if o := certs[h]; o != nil && (o.Namespace != ing.Namespace || !slices.Contains(ingress.Secrets(o), t.SecretName)) {
				add("host %q has the certificate of the older Ingress %s/%s", h, o.Namespace, o.Name)
			}
		}
	}
	return out
}

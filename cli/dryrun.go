package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/manifests"
)

// dryRun is a flag as kubectl's: who looks at what would be written.
type dryRun string

const (
	dryRunNone   dryRun = "none"
	dryRunClient dryRun = "client" // this command, without a server
	dryRunServer dryRun = "server" // the server, which knows what there is
)

// String implements pflag.Value.
func (d *dryRun) String() string { return string(*d) }

// Type implements pflag.Value.
func (d *dryRun) Type() string { return "none|client|server" }

// Set implements pflag.Value. true and false are what the flag once was.
func (d *dryRun) Set(s string) error {
	switch v := dryRun(s); v {
	case dryRunNone, dryRunClient, dryRunServer:
		*d = v
	case "true", "":
		*d = dryRunServer
	case "false":
		*d = dryRunNone
	default:
		return errors.New("server, client or none is wanted (alone it is server)")
	}
	return nil
}

// applyHere looks at the objects as far as that goes without a server.
func (a *app) applyHere(ctx context.Context, docs []manifest, o applyOptions) error {
	namespace := a.namespace
	if namespace == "" {
		namespace = corev1.NamespaceDefault
		if c, err := a.client(); err == nil && c.Namespace != "" {
			namespace = c.Namespace
		}
	}
	each := a.each("checked", len(docs))
	for i, d := range docs {
		err := errNoName
		if d.name != "" {
			err = d.check(namespace)
		}
		if err != nil {
			err = d.refused(err)
		} else {
			err = a.showHere(d, o.output)
		}
		if err := each.note(ctx, i, err); err != nil {
			return err
		}
	}
	return each.done()
}

func (a *app) showHere(d manifest, output string) error {
	kind := strings.ToLower(d.gvk.Kind)
	if k := manifests.ByGroupKind(d.gvk.GroupKind()); k != nil {
		kind = k.Singular
	}
	if d.gvk.Group != "" {
		kind += "." + d.gvk.Group
	}
	warnings, _ := manifests.Unsupported(d.object)
	for _, w := range warnings {
		a.notef("Warning: %s\n", w)
	}
	switch output {
	case "name":
		a.printf("%s/%s\n", kind, d.name)
	case "yaml", "json":
		return a.marshal(d.object, output)
	default:
		a.printf("%s/%s checked (dry run without a server: what there is was not looked at)\n", kind, d.name)
	}
	return nil
}

// sameNodePorts names Services of the files that want the same node port: a dry
// run sees each alone, and without one the first would be applied before the
// second is refused.
func sameNodePorts(docs []manifest, namespace string) (bad []error) {
	taken := map[int32]manifest{}
	for _, d := range docs {
		svc, ok := d.object.(*corev1.Service)
		if !ok {
			continue
		}
		var own []int32
		for i := range svc.Spec.Ports {
			p := svc.Spec.Ports[i].NodePort
			first, there := taken[p]
			switch {
			case p == 0 || slices.Contains(own, p):
			case !there:
				taken[p] = d
			case first.name != d.name || first.namespaceOr(namespace) != d.namespaceOr(namespace):
				source := d.source
				if line := d.place(fmt.Sprintf("spec.ports[%d].nodePort", i)); line != 0 {
					source = fmt.Sprintf("%s:%d", d.file, line)
				}
				bad = append(bad, fmt.Errorf("%s: Service %q %w: spec.ports[%d].nodePort: %d is that of Service %q, too (%s)", source, d.name, errInvalid, i, p, first.name, first.source))
			}
			own = append(own, p)
		}
	}
	return bad
}

// isTaken says whether a refusal is for an address or port that another Service
// has: it may be free once the objects before it are applied.
func isTaken(err error) bool {
	var se *client.StatusError
	if !errors.As(err, &se) || se.Status.Details == nil || len(se.Status.Details.Causes) == 0 {
		return false
	}
	for _, c := range se.Status.Details.Causes {
		if !strings.Contains(c.Message, "is already allocated") {
			return false
		}
	}
	return true
}

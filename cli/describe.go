package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"

	"github.com/dunlin-project/dunlin/cli/client"
)

func (a *app) describeCmd() *cobra.Command {
	var selector string
	c := &cobra.Command{
		Use:   "describe (TYPE [NAME...] | TYPE/NAME... | TYPE -l SELECTOR)",
		Short: "Show an object, its state and what happened to it",
		Long: `Show an object, its state and what happened to it.

Anything that is not running says why, for how long and what to do next.
With --local the agent of this machine is asked instead of a server.`,
		Example: `  dunlin describe pod hello-5d9c
  dunlin describe pods -l app=hello
  dunlin describe node pi-3
  dunlin describe pod hello-5d9c --local`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeObjects,
		RunE:              func(cmd *cobra.Command, args []string) error { return a.describe(cmd.Context(), args, selector) },
	}
	c.Flags().StringVarP(&selector, "selector", "l", "", "those with these labels, such as app=hello")
	return a.viewing(c)
}

func (a *app) describe(ctx context.Context, args []string, selector string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	ts, err := a.targets(ctx, c, args)
	if err != nil {
		return err
	}
	first := true
	for _, t := range ts {
		if len(t.names) > 0 && selector != "" {
			return usagef("give either names or a selector, not both")
		}
		if len(t.names) == 0 {
			if t.names, err = namesOf(ctx, c, t.res, selector); err != nil {
				return err
			}
			if len(t.names) == 0 {
				a.notef("No %s found.\n", t.res.Name)
			}
		}
		for _, n := range t.names {
			u, err := c.Object(ctx, t.res.Path(c.Namespace, n))
			if err != nil {
				return err
			}
			if !first {
				a.printf("\n")
			}
			first = false
			if err := a.describeOne(ctx, c, t.res, u); err != nil {
				return err
			}
		}
	}
	return nil
}

// namesOf lists the names of a type, those with the labels if there is a
// selector.
func namesOf(ctx context.Context, c *client.Client, r client.Resource, selector string) ([]string, error) {
	q := url.Values{}
	if selector != "" {
		q.Set("labelSelector", selector)
	}
	var l metav1.PartialObjectMetadataList
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: r.Path(c.Namespace, ""), Query: q}, &l); err != nil {
		return nil, err
	}
	names := make([]string, len(l.Items))
	for i := range l.Items {
		names[i] = l.Items[i].Name
	}
	return names, nil
}

func (a *app) field(name, format string, args ...any) {
	a.printf("%-15s%s\n", name+":", fmt.Sprintf(format, args...))
}

func (a *app) describeOne(ctx context.Context, c *client.Client, r client.Resource, u *unstructured.Unstructured) error {
	a.field("Name", "%s", u.GetName())
	if r.Namespaced {
		a.field("Namespace", "%s", u.GetNamespace())
	}
	a.field("Kind", "%s", u.GetKind())
	a.field("Age", "%s", age(u.GetCreationTimestamp()))
	if t := u.GetDeletionTimestamp(); t != nil {
		a.field("Terminating", "%s, waits for %s", deletedFor(u, time.Now()), waitsFor(u))
		if s := a.waitsOn(ctx, c, u); s != "" {
			a.field("Next", "%s", s)
		}
	}
	for _, o := range u.GetOwnerReferences() {
		if o.Controller != nil && *o.Controller {
			a.field("Controlled by", "%s/%s", o.Kind, o.Name)
		}
	}
	a.pairs("Labels", u.GetLabels())
	ann := u.GetAnnotations()
	delete(ann, "kubectl.kubernetes.io/last-applied-configuration")
	a.pairs("Annotations", ann)
	var err error
	switch u.GetKind() {
	case "Pod":
		err = a.describePod(u)
	case "Node":
		err = a.describeNode(ctx, c, u)
	case "Secret":
		a.describeSecret(u)
	case "PersistentVolumeClaim":
		err = a.describeClaim(ctx, c, u)
	case "PersistentVolume":
		err = a.describeVolume(ctx, c, u)
	default:
		err = a.describeRest(u)
	}
	if err != nil {
		return err
	}
	a.conditions(u)
	tab, err := eventsFor(ctx, c, u.GetNamespace(), u.GetKind(), u.GetName(), string(u.GetUID()))
	if err != nil {
		return err
	}
	if len(tab.Rows) == 0 {
		if c.Local() {
			a.field("Events", "<none> that no server has been told yet")
			return nil
		}
		a.field("Events", "<none>")
		return nil
	}
	a.printf("Events:\n")
	w := &tableWriter{out: indented{a.out}}
	return w.print(tab)
}

func age(t metav1.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(time.Since(t.Time))
}

func (a *app) pairs(name string, m map[string]string) {
	if len(m) == 0 {
		return
	}
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for i, k := range keys {
		v := m[k]
		if len(v) > 120 {
			v = v[:120] + "…"
		}
		if i == 0 {
			a.field(name, "%s=%s", k, v)
			continue
		}
		a.printf("%-15s%s=%s\n", "", k, v)
	}
}

func (a *app) describePod(u *unstructured.Unstructured) error {
	var p corev1.Pod
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &p); err != nil {
		return fmt.Errorf("read pod: %w", err)
	}
	node := p.Spec.NodeName
	if node == "" {
		node = "<none>"
	}
	a.field("Node", "%s", node)
	a.field("Status", "%s", p.Status.Phase)
	if p.Status.Reason != "" {
		a.field("Reason", "%s", p.Status.Reason)
	}
	if p.Status.Message != "" {
		a.field("Message", "%s", p.Status.Message)
	}
	if w, ok := whyPod(&p, a.local); ok {
		a.field("Why", "%s", w.text(time.Now()))
		a.field("Next", "%s", w.next)
	}
	if p.Status.PodIP != "" {
		a.field("IP", "%s", p.Status.PodIP)
	}
	a.field("QoS", "%s", p.Status.QOSClass)
	if p.Spec.RuntimeClassName != nil {
		a.field("RuntimeClass", "%s", *p.Spec.RuntimeClassName)
	}
	statuses := map[string]corev1.ContainerStatus{}
	for _, s := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
		statuses[s.Name] = s
	}
	show := func(title string, cs []corev1.Container) {
		if len(cs) == 0 {
			return
		}
		a.printf("%s:\n", title)
		for i := range cs {
			a.describeContainer(&cs[i], statuses[cs[i].Name])
		}
	}
	show("Init containers", p.Spec.InitContainers)
	show("Containers", p.Spec.Containers)
	for i := range p.Spec.Volumes {
		a.field("Volume", "%s %s", p.Spec.Volumes[i].Name, volumeText(&p.Spec.Volumes[i].VolumeSource))
	}
	return nil
}

// volumeText says in a few words where a volume comes from.
func volumeText(v *corev1.VolumeSource) string {
	switch {
	case v.EmptyDir != nil && v.EmptyDir.Medium != "":
		return "emptyDir in memory"
	case v.EmptyDir != nil:
		return "emptyDir, goes with the pod"
	case v.ConfigMap != nil:
		return "configMap " + v.ConfigMap.Name
	case v.Secret != nil:
		return "secret " + v.Secret.SecretName
	case v.HostPath != nil:
		return "hostPath " + v.HostPath.Path
	case v.PersistentVolumeClaim != nil:
		return "claim " + v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return "a claim of its own, which goes with the pod"
	case v.DownwardAPI != nil:
		return "downwardAPI"
	case v.Projected != nil:
		var parts []string
		for _, s := range v.Projected.Sources {
			switch {
			case s.ServiceAccountToken != nil:
				parts = append(parts, "token of the service account")
			case s.ConfigMap != nil:
				parts = append(parts, "configMap "+s.ConfigMap.Name)
			case s.Secret != nil:
				parts = append(parts, "secret "+s.Secret.Name)
			case s.DownwardAPI != nil:
				parts = append(parts, "downwardAPI")
			}
		}
		return "projected: " + strings.Join(parts, ", ")
	}
	b, err := json.Marshal(v)
	if err != nil {
		return "<unknown>"
	}
	return string(b)
}

func (a *app) describeContainer(c *corev1.Container, s corev1.ContainerStatus) {
	a.printf("  %s:\n", c.Name)
	line := func(k, format string, args ...any) { a.printf("    %-12s%s\n", k+":", fmt.Sprintf(format, args...)) }
	line("Image", "%s", c.Image)
	if s.ImageID != "" {
		line("Image ID", "%s", s.ImageID)
	}
	for _, p := range c.Ports {
		line("Port", "%d/%s %s", p.ContainerPort, p.Protocol, p.Name)
	}
	if len(c.Command)+len(c.Args) > 0 {
		line("Command", "%s", strings.Join(append(c.Command, c.Args...), " "))
	}
	for _, r := range []struct {
		name string
		list corev1.ResourceList
	}{{"Requests", c.Resources.Requests}, {"Limits", c.Resources.Limits}} {
		var parts []string
		for k, q := range r.list {
			parts = append(parts, fmt.Sprintf("%s %s", k, q.String()))
		}
		if sort.Strings(parts); len(parts) > 0 {
			line(r.name, "%s", strings.Join(parts, ", "))
		}
	}
	line("State", "%s", stateText(s.State))
	if s.LastTerminationState.Terminated != nil {
		line("Last state", "%s", stateText(s.LastTerminationState))
	}
	line("Ready", "%v", s.Ready)
	line("Restarts", "%d", s.RestartCount)
}

func stateText(s corev1.ContainerState) string {
	switch {
	case s.Running != nil:
		return "running for " + age(s.Running.StartedAt)
	case s.Waiting != nil:
		return strings.TrimSuffix("waiting: "+s.Waiting.Reason+": "+s.Waiting.Message, ": ")
	case s.Terminated != nil:
		t := fmt.Sprintf("ended %s ago: %s, exit code %d", age(s.Terminated.FinishedAt), s.Terminated.Reason, s.Terminated.ExitCode)
		if s.Terminated.Message != "" {
			t += "\n                " + strings.ReplaceAll(strings.TrimSpace(s.Terminated.Message), "\n", "\n                ")
		}
		return t
	}
	return "not started"
}

func (a *app) describeNode(ctx context.Context, c *client.Client, u *unstructured.Unstructured) error {
	var n corev1.Node
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &n); err != nil {
		return fmt.Errorf("read node: %w", err)
	}
	for _, t := range n.Spec.Taints {
		a.field("Taint", "%s", t.ToString())
	}
	if n.Spec.Unschedulable {
		a.field("Schedulable", "no (cordoned)")
	}
	for _, ad := range n.Status.Addresses {
		a.field("Address", "%s %s", ad.Type, ad.Address)
	}
	if c.Local() {
		if err := a.describeLink(ctx, c); err != nil {
			return err
		}
	}
	i := n.Status.NodeInfo
	a.field("System", "%s, kernel %s, %s, %s", i.OSImage, i.KernelVersion, i.Architecture, i.ContainerRuntimeVersion)
	var l corev1.PodList
	q := url.Values{"fieldSelector": {"spec.nodeName=" + n.Name + ",status.phase!=Succeeded,status.phase!=Failed"}}
	if err := c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/api/v1/pods", Query: q}, &l); err != nil {
		return err
	}
	names := make([]string, 0, len(n.Status.Allocatable))
	for k := range n.Status.Allocatable {
		names = append(names, string(k))
	}
	sort.Strings(names)
	a.printf("Resources:\n")
	rows := [][]string{{"NAME", "REQUESTED", "ALLOCATABLE", "CAPACITY"}}
	for _, k := range names {
		sum := corev1.ResourceList{}
		for p := range l.Items {
			addRequests(sum, &l.Items[p])
		}
		name := corev1.ResourceName(k)
		req, al, ca := sum[name], n.Status.Allocatable[name], n.Status.Capacity[name]
		if name == corev1.ResourcePods {
			req.Set(int64(len(l.Items)))
		}
		rows = append(rows, []string{k, req.String(), al.String(), ca.String()})
	}
	if err := (&tableWriter{out: indented{a.out}}).write(rows); err != nil {
		return err
	}
	a.printf("Pods: %d\n", len(l.Items))
	for _, p := range l.Items {
		a.printf("  %s/%s\n", p.Namespace, p.Name)
	}
	return nil
}

func (a *app) describeSecret(u *unstructured.Unstructured) {
	data, _, _ := unstructured.NestedStringMap(u.Object, "data")
	t, _, _ := unstructured.NestedString(u.Object, "type")
	a.field("Type", "%s", t)
	keys := make([]string, 0, len(data))
	for k := range data {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		a.field("Data", "%s (%d bytes, base64)", k, len(data[k]))
	}
}

// describeRest prints what the object's kind has besides metadata.
func (a *app) describeRest(u *unstructured.Unstructured) error {
	rest := map[string]any{}
	for k, v := range u.Object {
		switch k {
		case "apiVersion", "kind", "metadata":
			continue
		case "status":
			if m, ok := v.(map[string]any); ok {
				m = runtime.DeepCopyJSON(m)
				delete(m, "conditions")
				if len(m) == 0 {
					continue
				}
				v = m
			}
		}
		rest[k] = v
	}
	if len(rest) == 0 {
		return nil
	}
	b, err := yaml.Marshal(rest)
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	a.printf("%s", b)
	return nil
}

func (a *app) conditions(u *unstructured.Unstructured) {
	conds, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	if len(conds) == 0 {
		return
	}
	a.printf("Conditions:\n")
	rows := [][]string{{"TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"}}
	for _, x := range conds {
		m, ok := x.(map[string]any)
		if !ok {
			continue
		}
		s := func(k string) string { v, _ := m[k].(string); return v }
		since := "<unknown>"
		if t, err := time.Parse(time.RFC3339, s("lastTransitionTime")); err == nil {
			since = duration.HumanDuration(time.Since(t))
		}
		rows = append(rows, []string{s("type"), s("status"), since, s("reason"), s("message")})
	}
	_ = (&tableWriter{out: indented{a.out}}).write(rows)
}

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/cli/client"
)

// drainRetry is how long a refused eviction waits, as kubectl does.
const drainRetry = 5 * time.Second

type drainOptions struct {
	timeout    time.Duration
	grace      int64
	force      bool
	startFirst bool
	retry      time.Duration
}

func (a *app) cordonCmd() *cobra.Command {
	return &cobra.Command{
		Use: "cordon NODE...", Short: "Let no new pods onto a node", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.cordonAll(cmd.Context(), args, true) },
	}
}

func (a *app) uncordonCmd() *cobra.Command {
	return &cobra.Command{
		Use: "uncordon NODE...", Short: "Let new pods onto a node again", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.cordonAll(cmd.Context(), args, false) },
	}
}

func (a *app) drainCmd() *cobra.Command {
	o := drainOptions{retry: drainRetry}
	c := &cobra.Command{
		Use:   "drain NODE",
		Short: "Cordon a node and move its pods away, within their disruption budgets",
		Long: `Drain cordons the node and evicts its pods. Pods of DaemonSets and static pods
stay: they belong to the node. A pod that a PodDisruptionBudget holds is asked
for again every 5 s; what holds it is said. With --start-first the Deployments
of such pods are restarted, so that a new pod serves elsewhere before the old
one goes: the way out where one replica must always be available. What the new
pod waits for is said, too. An emptyDir goes with its pod, as ever, and is not
asked about (kubectl drain asks for --delete-emptydir-data); which pods have
one is said.`,
		Example: `  dunlin drain pi-3 --timeout 5m
  dunlin drain pi-3 --start-first`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.drain(cmd.Context(), args[0], o) },
	}
	c.Flags().DurationVar(&o.timeout, "timeout", 0, "give up after this (0: never)")
	c.Flags().Int64Var(&o.grace, "grace-period", -1, "seconds that pods get to stop (-1: their own)")
	c.Flags().BoolVar(&o.force, "force", false, "also evict pods that nothing will make anew")
	c.Flags().BoolVar(&o.startFirst, "start-first", false, "restart Deployments whose pods a budget holds, so that the replacement comes first")
	return c
}

func (a *app) cordonAll(ctx context.Context, names []string, on bool) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := a.cordon(ctx, c, n, on); err != nil {
			return err
		}
	}
	return nil
}

func nodePath(name string) string { return "/api/v1/nodes/" + url.PathEscape(name) }

func (a *app) cordon(ctx context.Context, c *client.Client, name string, on bool) error {
	var n corev1.Node
	if err := c.JSON(ctx, client.Request{Path: nodePath(name)}, &n); err != nil {
		return err
	}
	done := "cordoned"
	if !on {
		done = "uncordoned"
	}
	if n.Spec.Unschedulable == on {
		a.printf("node/%s already %s\n", name, done)
		return nil
	}
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"unschedulable": on}})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: nodePath(name), ContentType: "application/merge-patch+json", Body: body}
	if err := c.JSON(ctx, r, nil); err != nil {
		return err
	}
	a.printf("node/%s %s\n", name, done)
	return nil
}

// evictee is one pod that shall go.
type evictee struct {
	pod     corev1.Pod
	asked   bool   // evicted, and on its way out
	blocked string // why not, "" if it was not refused
}

func (e *evictee) label() string { return "pod/" + e.pod.Namespace + "/" + e.pod.Name }

func (a *app) drain(ctx context.Context, node string, o drainOptions) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if err := a.cordon(ctx, c, node, true); err != nil {
		return err
	}
	list, err := a.evictees(ctx, c, node, o.force)
	if err != nil {
		return err
	}
	wait := ctx
	if o.timeout > 0 {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, o.timeout)
		defer cancel()
	}
	d := drainage{app: a, c: c, node: node, o: o, restarted: map[types.UID]*replaced{}}
	left, err := d.run(wait, list)
	if err == nil {
		a.printf("node/%s drained\n", node)
		return nil
	}
	for _, e := range left {
		switch {
		case e.blocked != "":
			a.notef("%s is still there: %s\n%s", e.label(), e.blocked, d.waits(e))
		case !e.asked:
			a.notef("%s is still there: it was not evicted\n", e.label())
		case d.offline:
			a.notef("%s is still there: it was evicted, and its node is out of reach\n", e.label())
		default:
			a.notef("%s is still there: it was evicted and has not stopped yet\n", e.label())
		}
	}
	hint := "the node stays cordoned; 'dunlin uncordon " + node + "' takes that back"
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted with %d pods left; %s: %w", len(left), hint, ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%d pods left after %s; %s", len(left), o.timeout, hint)
	}
	return err
}

// evictees lists the node's pods that shall go, and says which stay.
func (a *app) evictees(ctx context.Context, c *client.Client, node string, force bool) ([]*evictee, error) {
	var l corev1.PodList
	r := client.Request{Path: "/api/v1/pods", Query: url.Values{"fieldSelector": {"spec.nodeName=" + node}}}
	if err := c.JSON(ctx, r, &l); err != nil {
		return nil, err
	}
	var out []*evictee
	var bare, scratch []string
	for _, p := range l.Items {
		over := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		owner := metav1.GetControllerOf(&p)
		switch _, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]; {
		case mirror:
			a.notef("pod/%s/%s stays: it is a static pod of the node\n", p.Namespace, p.Name)
			continue
		case owner != nil && owner.Kind == "DaemonSet" && !over:
			a.notef("pod/%s/%s stays: its DaemonSet wants it on the node\n", p.Namespace, p.Name)
			continue
		case owner == nil && !over && !force:
			bare = append(bare, p.Namespace+"/"+p.Name)
			continue
		}
		if !over && slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.EmptyDir != nil }) {
			scratch = append(scratch, p.Namespace+"/"+p.Name)
		}
		out = append(out, &evictee{pod: p, asked: p.DeletionTimestamp != nil})
	}
	if len(bare) > 0 {
		return nil, fmt.Errorf("nothing would make these pods anew: %s; --force evicts them all the same (node/%s stays cordoned)", strings.Join(bare, ", "), node)
	}
	if len(scratch) > 0 {
		a.notef("the emptyDir volumes of these go with them: %s\n", strings.Join(scratch, ", "))
	}
	return out, nil
}

// drainage is one drain under way.
type drainage struct {
	app       *app
	c         *client.Client
	node      string
	o         drainOptions
	offline   bool                    // the node is out of reach, which was said
	restarted map[types.UID]*replaced // by the ReplicaSet of the held pods
}

// replaced is a Deployment whose new pods come first.
type replaced struct {
	namespace, name string // "" is no Deployment, or one that was not restarted
	waits           string // what its pods elsewhere were last said to wait for
}

// run evicts until nothing is left, or the context ends; left is what is.
func (d *drainage) run(ctx context.Context, left []*evictee) ([]*evictee, error) {
	for {
		var still []*evictee
		for i, e := range left {
			gone, err := d.step(ctx, e)
			if err != nil {
				return append(still, left[i:]...), err
			}
			if !gone {
				still = append(still, e)
			}
		}
		if left = still; len(left) == 0 {
			return nil, nil
		}
		d.tellOffline(ctx, left)
		pause := d.o.retry
		if !slices.ContainsFunc(left, func(e *evictee) bool { return !e.asked }) {
			pause = min(pause, time.Second) // only stopping is waited for
		}
		select {
		case <-ctx.Done():
			return left, ctx.Err()
		case <-time.After(pause):
		}
	}
}

// tellOffline says once that the node is out of reach, as what was evicted
// there ends only once it is back. Whether it is cannot always be read; that
// is no reason to give up.
func (d *drainage) tellOffline(ctx context.Context, left []*evictee) {
	if !slices.ContainsFunc(left, func(e *evictee) bool { return e.asked }) {
		return
	}
	var n corev1.Node
	if err := d.c.JSON(ctx, client.Request{Path: nodePath(d.node)}, &n); err != nil {
		return
	}
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	was := d.offline
	d.offline = i >= 0 && n.Status.Conditions[i].Status == corev1.ConditionUnknown
	if d.offline && !was {
		d.app.notef("node/%s is out of reach since %s: its pods end when it is back. If it is off for good, 'dunlin node declare-dead %s' releases them\n",
			d.node, n.Status.Conditions[i].LastTransitionTime.UTC().Format(time.RFC3339), d.node)
	}
}

// step looks after one pod, and evicts it if that was not done.
func (d *drainage) step(ctx context.Context, e *evictee) (gone bool, err error) {
	path := "/api/v1/namespaces/" + url.PathEscape(e.pod.Namespace) + "/pods/" + url.PathEscape(e.pod.Name)
	if e.asked {
		var p corev1.Pod
		err := d.c.JSON(ctx, client.Request{Path: path}, &p)
		if client.IsNotFound(err) || err == nil && p.UID != e.pod.UID {
			return true, nil
		}
		return false, err
	}
	ev := policyv1.Eviction{TypeMeta: metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
		ObjectMeta:    metav1.ObjectMeta{Namespace: e.pod.Namespace, Name: e.pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(e.pod.UID))}}
	if d.o.grace >= 0 {
		ev.DeleteOptions.GracePeriodSeconds = &d.o.grace
	}
	body, err := json.Marshal(ev)
	if err != nil {
		return false, fmt.Errorf("make request: %w", err)
	}
	err = d.c.JSON(ctx, client.Request{Method: http.MethodPost, Path: path + "/eviction", ContentType: client.JSON, Body: body}, nil)
	var refused *client.StatusError
	switch {
	case err == nil:
		e.asked, e.blocked = true, ""
		d.app.printf("%s evicted\n", e.label())
		return false, nil
	case client.IsNotFound(err), client.IsConflict(err):
		return true, nil // gone, or another pod of the same name
	case errors.As(err, &refused) && (refused.Status.Code == http.StatusTooManyRequests || budgetRefuses(&refused.Status)):
		why := blocker(&refused.Status)
		if why != e.blocked {
			d.app.notef("%s waits: %s\n", e.label(), why)
		}
		e.blocked = why
		return false, d.startFirst(ctx, e)
	}
	return false, fmt.Errorf("evict %s: %w", e.label(), err)
}

// budgetRefuses says whether budgets are why a pod is not evicted: more than
// one of a pod is a server's error to upstream.
func budgetRefuses(s *metav1.Status) bool {
	return s.Details != nil && slices.ContainsFunc(s.Details.Causes, func(c metav1.StatusCause) bool { return c.Type == policyv1.DisruptionBudgetCause })
}

// blocker is what the server says holds a pod.
func blocker(s *metav1.Status) string {
	if s.Details != nil {
		for _, c := range s.Details.Causes {
			if c.Type == policyv1.DisruptionBudgetCause && c.Message != "" {
				return c.Message
			}
		}
	}
	return s.Message
}

// startFirst restarts the Deployment of a held pod, once: the node is
// cordoned, so the new pod comes up elsewhere before the old one goes.
func (d *drainage) startFirst(ctx context.Context, e *evictee) error {
	owner := metav1.GetControllerOf(&e.pod)
	if owner == nil || owner.Kind != "ReplicaSet" {
		return nil
	}
	if r := d.restarted[owner.UID]; r != nil {
		return d.replacement(ctx, r)
	}
	made := &replaced{}
	d.restarted[owner.UID] = made
	var rs struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
	}
	if err := d.c.JSON(ctx, client.Request{Path: "/apis/apps/v1/namespaces/" + url.PathEscape(e.pod.Namespace) + "/replicasets/" + url.PathEscape(owner.Name)}, &rs); err != nil {
		return fmt.Errorf("read the owner of %s: %w", e.label(), err)
	}
	up := metav1.GetControllerOf(&rs.Metadata)
	if up == nil || up.Kind != "Deployment" {
		return nil
	}
	if !d.o.startFirst {
		d.app.notef("  to start its replacement first: dunlin rollout restart -n %s deploy/%s (drain does it with --start-first)\n", e.pod.Namespace, up.Name)
		return nil
	}
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{
		"annotations": map[string]any{"kubectl.kubernetes.io/restartedAt": time.Now().UTC().Format(time.RFC3339)}}}}})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: deploymentPath(e.pod.Namespace, up.Name), ContentType: "application/strategic-merge-patch+json", Body: body}
	if err := d.c.JSON(ctx, r, nil); err != nil {
		return fmt.Errorf("restart deployment %s: %w", up.Name, err)
	}
	d.app.printf("deployment.apps/%s restarted: its new pods come first\n", up.Name)
	made.namespace, made.name = e.pod.Namespace, up.Name
	return nil
}

// waits is what the replacement of a held pod waits for.
func (d *drainage) waits(e *evictee) string {
	if owner := metav1.GetControllerOf(&e.pod); owner != nil && d.restarted[owner.UID] != nil {
		return d.restarted[owner.UID].waits
	}
	return ""
}

// replacement says what the pods of a restarted Deployment wait for that shall
// serve in place of those on the node, when it is something new.
func (d *drainage) replacement(ctx context.Context, r *replaced) error {
	if r.name == "" {
		return nil
	}
	var up appsv1.Deployment
	if err := d.c.JSON(ctx, client.Request{Path: deploymentPath(r.namespace, r.name)}, &up); client.IsNotFound(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("look after deployment %s: %w", r.name, err)
	}
	var pods corev1.PodList
	q := url.Values{"labelSelector": {metav1.FormatLabelSelector(up.Spec.Selector)}}
	if err := d.c.JSON(ctx, client.Request{Path: "/api/v1/namespaces/" + url.PathEscape(r.namespace) + "/pods", Query: q}, &pods); err != nil {
		return fmt.Errorf("look after the pods of deployment %s: %w", r.name, err)
	}
	text := podReasons(slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == d.node }))
	if text != r.waits && text != "" {
		d.app.notef("deployment.apps/%s has no new pod that serves yet:\n%s", r.name, text)
	}
	r.waits = text
	return nil
}

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/cli/client"
)

// rolledSet is a DaemonSet or a StatefulSet, whose revisions are
// ControllerRevisions.
type rolledSet struct {
	a        *app
	c        *client.Client
	res      client.Resource
	name     string
	progress func(raw []byte) (message string, done bool, err error)
}

// rolledSets are the kinds besides Deployments, with how far they are.
var rolledSets = map[string]func(raw []byte) (string, bool, error){
	"DaemonSet": func(raw []byte) (string, bool, error) {
		var d appsv1.DaemonSet
		if err := json.Unmarshal(raw, &d); err != nil {
			return "", false, fmt.Errorf("read DaemonSet: %w", err)
		}
		return daemonSetProgress(&d)
	},
	"StatefulSet": func(raw []byte) (string, bool, error) {
		var s appsv1.StatefulSet
		if err := json.Unmarshal(raw, &s); err != nil {
			return "", false, fmt.Errorf("read StatefulSet: %w", err)
		}
		return statefulSetProgress(&s)
	},
}

var errOnDelete = errors.New("its update strategy is OnDelete: pods change when they are deleted, there is no rollout to wait for")

// daemonSetProgress says in one line where the rollout is. Nodes that are
// away are no part of it, and are named at the end.
func daemonSetProgress(d *appsv1.DaemonSet) (message string, done bool, err error) {
	s := d.Status
	switch {
	case d.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType:
		return "", false, errOnDelete
	case d.Generation > s.ObservedGeneration:
		return "Waiting for the controller to see the new specification...", false, nil
	case s.UpdatedNumberScheduled < s.DesiredNumberScheduled:
		message = fmt.Sprintf("Waiting: %d of %d new pods have been created...", s.UpdatedNumberScheduled, s.DesiredNumberScheduled)
	case s.NumberAvailable < s.DesiredNumberScheduled:
		message = fmt.Sprintf("Waiting: %d of %d updated pods are available...", s.NumberAvailable, s.DesiredNumberScheduled)
	default:
		message, done = fmt.Sprintf("daemon set %q successfully rolled out", d.Name), true
	}
	for _, c := range s.Conditions {
		message += nodesAway(string(c.Type), c.Status, c.Message)
	}
	return message, done, nil
}

// nodesAway is what a set's condition says of nodes that are silent, or of
// others' pods that have its pods' names: a rollout may end without them, or
// wait for them.
func nodesAway(condition string, status corev1.ConditionStatus, message string) string {
	if condition != "NodesAway" && condition != "NamesTaken" || status != corev1.ConditionTrue {
		return ""
	}
	return "; " + message
}

// statefulSetProgress says in one line where the rollout is, and which nodes
// with pods of the set are away.
func statefulSetProgress(d *appsv1.StatefulSet) (message string, done bool, err error) {
	s, want := d.Status, int32(1)
	if d.Spec.Replicas != nil {
		want = *d.Spec.Replicas
	}
	partition := int32(0)
	if r := d.Spec.UpdateStrategy.RollingUpdate; r != nil && r.Partition != nil {
		partition = *r.Partition
	}
	switch {
	case d.Spec.UpdateStrategy.Type == appsv1.OnDeleteStatefulSetStrategyType:
		return "", false, errOnDelete
	case d.Generation > s.ObservedGeneration:
		return "Waiting for the controller to see the new specification...", false, nil
	case s.ReadyReplicas < want:
		message = fmt.Sprintf("Waiting: %d of %d pods are ready...", s.ReadyReplicas, want)
	case partition > 0 && s.UpdatedReplicas < want-partition:
		message = fmt.Sprintf("Waiting: %d of %d new pods above the partition have been created...", s.UpdatedReplicas, want-partition)
	case partition > 0:
		message, done = fmt.Sprintf("partitioned roll out of stateful set %q complete: %d new pods", d.Name, s.UpdatedReplicas), true
	case s.UpdateRevision != s.CurrentRevision:
		message = fmt.Sprintf("Waiting: %d of %d pods are of revision %s...", s.UpdatedReplicas, want, s.UpdateRevision)
	default:
		message, done = fmt.Sprintf("stateful set %q successfully rolled out", d.Name), true
	}
	for _, c := range s.Conditions {
		message += nodesAway(string(c.Type), c.Status, c.Message)
	}
	return message, done, nil
}

func (s *rolledSet) path() string { return s.res.Path(s.c.Namespace, s.name) }

func (s *rolledSet) raw(ctx context.Context) (json.RawMessage, *metav1.PartialObjectMetadata, error) {
	var raw json.RawMessage
	if err := s.c.JSON(ctx, client.Request{Method: http.MethodGet, Path: s.path()}, &raw); err != nil {
		return nil, nil, err
	}
	var m metav1.PartialObjectMetadata
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", s.name, err)
	}
	return raw, &m, nil
}

// status waits until the rollout is complete.
func (s *rolledSet) status(ctx context.Context) error {
	w := &waited{
		a: s.a, c: s.c, what: s.res.GVK.Kind, name: s.name, path: s.path(), list: s.res.Path(s.c.Namespace, ""), progress: s.progress,
	}
	return w.wait(ctx)
}

// setRevision is one ControllerRevision with its template.
type setRevision struct {
	number   int64
	template map[string]any
	images   string
}

// revisions lists the set's, oldest first.
func (s *rolledSet) revisions(ctx context.Context) (*metav1.PartialObjectMetadata, []setRevision, error) {
	_, m, err := s.raw(ctx)
	if err != nil {
		return nil, nil, err
	}
	var l appsv1.ControllerRevisionList
	if err := s.c.JSON(ctx, client.Request{Method: http.MethodGet, Path: "/apis/apps/v1/namespaces/" + url.PathEscape(s.c.Namespace) + "/controllerrevisions"}, &l); err != nil {
		return nil, nil, err
	}
	var out []setRevision
	for i := range l.Items {
		rev := &l.Items[i]
		if !metav1.IsControlledBy(rev, m) {
			continue
		}
		var data struct {
			Spec struct {
				Template map[string]any `json:"template"`
			} `json:"spec"`
		}
		var typed struct {
			Spec struct {
				Template corev1.PodTemplateSpec `json:"template"`
			} `json:"spec"`
		}
		if err := errors.Join(json.Unmarshal(rev.Data.Raw, &data), json.Unmarshal(rev.Data.Raw, &typed)); err != nil {
			return nil, nil, fmt.Errorf("read revision %s: %w", rev.Name, err)
		}
		delete(data.Spec.Template, "$patch")
		r := setRevision{number: rev.Revision, template: data.Spec.Template}
		for i, c := range typed.Spec.Template.Spec.Containers {
			if i > 0 {
				r.images += ","
			}
			r.images += c.Image
		}
		out = append(out, r)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].number < out[j].number })
	return m, out, nil
}

func (s *rolledSet) history(ctx context.Context) error {
	_, list, err := s.revisions(ctx)
	if err != nil {
		return err
	}
	s.a.printf("%-10s%s\n", "REVISION", "IMAGES")
	for _, r := range list {
		s.a.printf("%-10d%s\n", r.number, r.images)
	}
	return nil
}

func (s *rolledSet) undo(ctx context.Context, to int64) error {
	m, list, err := s.revisions(ctx)
	if err != nil {
		return err
	}
	if to == 0 {
		if len(list) < 2 {
			return fmt.Errorf("%s %q has no revision before the present one", s.res.GVK.Kind, s.name)
		}
		to = list[len(list)-2].number
	}
	var numbers []int64
	for _, r := range list {
		if numbers = append(numbers, r.number); r.number != to {
			continue
		}
		b, err := json.Marshal([]map[string]any{
			{"op": "test", "path": "/metadata/resourceVersion", "value": m.ResourceVersion},
			{"op": "replace", "path": "/spec/template", "value": r.template},
		})
		if err != nil {
			return fmt.Errorf("make request: %w", err)
		}
		if err := s.c.JSON(ctx, client.Request{Method: http.MethodPatch, Path: s.path(), ContentType: "application/json-patch+json", Body: b}, nil); err != nil {
			return err
		}
		s.a.printf("%s/%s rolled back to revision %d\n", s.res, s.name, to)
		return nil
	}
	return fmt.Errorf("%s %q has no revision %d (there are %v)", s.res.GVK.Kind, s.name, to, numbers)
}

func (s *rolledSet) restart(ctx context.Context) error {
	stamp := map[string]any{"kubectl.kubernetes.io/restartedAt": time.Now().UTC().Format(time.RFC3339)}
	b, err := json.Marshal(map[string]any{"spec": map[string]any{"template": map[string]any{"metadata": map[string]any{"annotations": stamp}}}})
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	r := client.Request{Method: http.MethodPatch, Path: s.path(), ContentType: "application/strategic-merge-patch+json", Body: b}
	if err := s.c.JSON(ctx, r, nil); err != nil {
		return err
	}
	s.a.printf("%s/%s restarted\n", s.res, s.name)
	return nil
}

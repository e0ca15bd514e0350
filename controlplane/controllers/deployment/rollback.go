package deployment

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// conditionRolledBack says that the template in force is one that the
// controller went back to. It goes when another one is rolled out.
const conditionRolledBack appsv1.DeploymentConditionType = "RolledBack"

// reasonFailing is the reason of a rollback for its share of crashing pods;
// for its deadline it is ProgressDeadlineExceeded.
const reasonFailing = "PodsFailing"

// givenUp is said in the Progressing condition of a set that is left before its
// deadline.
const givenUp = " was given up: "

// crashes is how often a container of a pod that is not Ready has ended when
// the pod counts as failing; look is how often that is looked at while a
// rollout is under way. Nothing is written for it.
const (
	crashes = 2
	look    = 5 * time.Second
)

// rolledBack is what the last rollback was: the annotation that is written
// together with the template.
type rolledBack struct {
	From     string `json:"from"`     // ReplicaSet
	Revision int64  `json:"revision"` // it had
	To       string `json:"to"`       // ReplicaSet
	Good     int64  `json:"good"`     // revision that To was known good as
	Reason   string `json:"reason"`
	Message  string `json:"message"` // why From was left
}

// lastRollback reads the annotation; nil if there is none that can be read.
func lastRollback(d *appsv1.Deployment) *rolledBack {
	v, ok := d.Annotations[manifests.AnnotationRolledBack]
	if !ok {
		return nil
	}
	var r rolledBack
	if json.Unmarshal([]byte(v), &r) != nil || r.To == "" {
		return nil
	}
	return &r
}

// wantsRollback says whether the user asked for it, and from which share of
// failing pods it comes before the deadline; 0 is never before.
func wantsRollback(d *appsv1.Deployment) (on bool, percent int) {
	on, percent, err := manifests.AutoRollback(d.Annotations)
	return on && err == nil, percent
}

// settleMost is the most that a pod must stay Ready before it counts.
const settleMost = 10 // seconds

// minReady is for how many seconds a pod must be Ready before it counts as
// available. A pod without a readiness probe is Ready for the moment that its
// program needs to fail: where the user wants bad versions to be left, and
// said nothing, such a moment must not cost a good pod. A quarter of the
// deadline leaves time for all of them to become available in turn.
func minReady(d *appsv1.Deployment) int32 {
	if on, _ := wantsRollback(d); !on || d.Spec.MinReadySeconds > 0 {
		return d.Spec.MinReadySeconds
	}
	if !hasDeadline(d) {
		return settleMost
	}
	return max(1, min(*d.Spec.ProgressDeadlineSeconds/4, settleMost))
}

// rollback decides whether the newest set is given up. st is the status of
// this round, failing of pods pods of the set fail. Pure.
func rollback(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, st *appsv1.DeploymentStatus, failing, pods int) *rolledBack {
	on, percent := wantsRollback(d)
	if !on || newRS == nil || d.Spec.Paused || wanted(d) == 0 || complete(d, st) || proven(newRS) {
		return nil // what fails once it has proven itself fails for another reason
	}
	if last := lastRollback(d); last != nil && last.To == newRS.Name {
		return nil // what was gone back to is not left again: that would have no end
	}
	r := &rolledBack{From: newRS.Name, Revision: revision(newRS.Annotations)}
	c := condition(st, appsv1.DeploymentProgressing)
	switch {
	case percent > 0 && pods > 0 && failing*100 >= percent*pods:
		r.Reason, r.Message = reasonFailing, fmt.Sprintf("%d of its %d pods fail again and again (%d%% are too many)", failing, pods, percent)
	case c != nil && strings.HasPrefix(c.Message, setText(newRS)+givenUp): // and the controller ended before it went back
		r.Reason, r.Message = reasonFailing, strings.TrimPrefix(c.Message, setText(newRS)+givenUp)
	case c != nil && c.Reason == reasonTimedOut && strings.Contains(c.Message, strconv.Quote(newRS.Name)):
		r.Reason, r.Message = reasonTimedOut, fmt.Sprintf("it made no progress for %d s", *d.Spec.ProgressDeadlineSeconds)
	default:
		return nil
	}
	to := lastGood(old)
	if to == nil {
		return nil
	}
	r.To, r.Good = to.Name, revision(to.Annotations)
	return r
}

func setText(rs *appsv1.ReplicaSet) string { return fmt.Sprintf("ReplicaSet %q", rs.Name) }

// text says what happened, for the event and the condition.
func (r *rolledBack) text() string {
	return fmt.Sprintf("revision %d (ReplicaSet %q) was given up: %s; the template is that of revision %d (ReplicaSet %q) again", r.Revision, r.From, r.Message, r.Good, r.To)
}

// rolledBackCondition shows the rollback for as long as its template is in
// force.
func rolledBackCondition(d *appsv1.Deployment, newRS *appsv1.ReplicaSet, st *appsv1.DeploymentStatus, now time.Time) {
	last := lastRollback(d)
	if last == nil || newRS == nil || newRS.Name != last.To {
		removeCondition(st, conditionRolledBack)
		return
	}
	if c := condition(st, conditionRolledBack); c != nil && c.Message != last.text() {
		removeCondition(st, conditionRolledBack) // an earlier one
	}
	setCondition(st, conditionRolledBack, corev1.ConditionTrue, last.Reason, last.text(), now)
}

// rollBack gives the newest set up if it must be; done: the round is over.
func (r *round) rollBack(ctx context.Context, st *appsv1.DeploymentStatus) (done bool, again time.Duration, err error) {
	on, percent := wantsRollback(r.d)
	if !on || r.newRS == nil {
		return false, 0, nil
	}
	if complete(r.d, st) && !r.watch.on {
		return false, 0, r.markGood(ctx)
	}
	if percent > 0 {
		again = look
	}
	back := rollback(r.d, r.old, r.newRS, st, r.watch.failing, r.watch.pods)
	if back == nil {
		return false, again, nil
	}
	i := slices.IndexFunc(r.old, func(rs *appsv1.ReplicaSet) bool { return rs.Name == back.To })
	template := r.old[i].Spec.Template.DeepCopy()
	delete(template.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	note, err := json.Marshal(back)
	if err != nil {
		return false, 0, fmt.Errorf("rollback: %w", err)
	}
	if back.Reason == reasonFailing {
		// Who watches the rollout with upstream's tools learns of its end by
		// this reason alone; after the next write the old version would pass
		// for the new one, rolled out.
		setCondition(st, appsv1.DeploymentProgressing, corev1.ConditionFalse, reasonTimedOut, setText(r.newRS)+givenUp+back.Message, r.now)
	}
	// First what the deadline counts from: the next round is another set's.
	if err := r.writeStatus(ctx, *st); err != nil {
		return false, 0, err
	}
	// One write: either the template is back and it says why, or nothing is.
	_, err = r.c.env.Store.Update(ctx, deploymentGK, r.d.Namespace, r.d.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		d, ok := cur.(*appsv1.Deployment)
		if !ok || d.UID != r.d.UID || d.Generation != r.d.Generation {
			return nil, errMoved
		}
		if d.Annotations == nil {
			d.Annotations = map[string]string{}
		}
		d.Annotations[manifests.AnnotationRolledBack] = string(note)
		d.Spec.Template = *template
		return d, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return true, 0, nil
	}
	if err != nil {
		return false, 0, fmt.Errorf("rollback to %s: %w", back.To, err)
	}
	r.note(events.Warning, "DeploymentRollback", "Rolled back: %s", back.text())
	return true, 0, nil
}

// markGood notes on the set that it was rolled out completely as its present
// revision, one write a rollout, and forgets an earlier rollback to another.
func (r *round) markGood(ctx context.Context) error {
	if last := lastRollback(r.d); last != nil && last.To != r.newRS.Name {
		_, err := r.c.env.Store.Update(ctx, deploymentGK, r.d.Namespace, r.d.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
			d, ok := cur.(*appsv1.Deployment)
			if !ok || d.UID != r.d.UID || d.Generation != r.d.Generation {
				return nil, errMoved
			}
			delete(d.Annotations, manifests.AnnotationRolledBack)
			return d, nil
		}, r.c.env.Write())
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("forget the last rollback: %w", err)
		}
	}
	if wanted(r.d) == 0 || proven(r.newRS) {
		return nil // of no pods nothing is known
	}
	return r.callGood(ctx, r.newRS)
}

// restartProgress begins the deadline anew for a set that was there before:
// the condition may still tell of another set, or of an earlier attempt.
func (r *round) restartProgress() {
	c := condition(&r.d.Status, appsv1.DeploymentProgressing)
	if on, _ := wantsRollback(r.d); !on || c == nil || r.newRS == nil {
		return
	}
	if r.renewed || c.Reason == reasonTimedOut && !strings.Contains(c.Message, strconv.Quote(r.newRS.Name)) {
		touch(&r.d.Status, fmt.Sprintf("ReplicaSet %q is progressing.", r.newRS.Name), r.now)
	}
}

// fails says whether a pod fails by itself. An evicted one does not.
func fails(pod *corev1.Pod) bool {
	if pod.Status.Phase == corev1.PodFailed {
		return pod.Status.Reason == ""
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return false
		}
	}
	return crashed(pod)
}

// crashed says whether a container of the pod ended so often by itself that
// its being Ready again means nothing.
func crashed(pod *corev1.Pod) bool {
	for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range list {
			ended := list[i].RestartCount
			if list[i].State.Terminated != nil || list[i].State.Waiting != nil && list[i].LastTerminationState.Terminated != nil {
				ended++
			}
			if ended >= crashes {
				return true
			}
		}
	}
	return false
}
